"""Cost of supervision: the same two ranks with the supervisor and its hang detection, and started
by hand without it.

    python -m benchmarks.supervision [--rounds=7] [--steps=600]

Rounds are interleaved; the ratio of a round is that of its two median step times. Also printed are
parts that can be measured without noise: the time of one heartbeat and of the heartbeats of a step,
and the CPU time of the supervisor during the training.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.core import heartbeat
from training.core.rundir import RunDir, read_json, read_records

SHAPE = {"depth": 2, "max_seq_len": 64, "device_batch_size": 12, "total_batch_size": 1536}
QUIET = {
    "eval_every": 0,
    "sample_tokens": 0,
    "tensorboard": "false",
    "report": "false",
    "use_dummy_wandb": "true",
    "device": "cpu",
    "log_every": 100,
}
CONFIG = "configs/dual_gpu/quickstart.py"
WARM_STEPS = 20
BEATS = 100_000


def beat_ns(folder: Path) -> float:
    writer = heartbeat.Heartbeat(folder / "rank0.bin", 0)
    started = time.perf_counter_ns()
    for number in range(BEATS // len(heartbeat.STEP_PHASES)):
        writer.step = number
        for phase in heartbeat.STEP_PHASES:
            writer.beat(phase)
    return (time.perf_counter_ns() - started) / BEATS


def flags(folder: Path, steps: int) -> list[str]:
    values = (
        SHAPE
        | QUIET
        | {"num_iterations": steps, "out_dir": folder, "log_dir": folder, "run_name": "run"}
    )
    return [f"--{name}={value}" for name, value in values.items()]


def step_ms(run: RunDir) -> float:
    return statistics.median(
        r["step_ms"] for r in read_records(run.metrics) if r["step"] > WARM_STEPS
    )


def watched(folder: Path, steps: int) -> tuple[float, float]:
    """(median step in ms, CPU seconds of the supervisor per second of training)."""
    run = RunDir(folder / "run")
    command = ["./launch_train.sh", "2", CONFIG, *flags(folder, steps)]
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    first: tuple[float, float] | None = None
    last = (0.0, 0.0)
    while launcher.poll() is None:
        beat, known = heartbeat.read(run.heartbeat(0)), read_json(run.supervisor)
        if beat and known and WARM_STEPS < beat.step < steps:
            last = time.monotonic(), _cpu_s(known["pid"])
            first = first or last
        time.sleep(0.05)
    if launcher.returncode or first is None:
        assert launcher.stderr
        sys.exit(f"the supervised run failed:\n{launcher.stderr.read().decode()[-2000:]}")
    return step_ms(run), (last[1] - first[1]) / (last[0] - first[0])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alone(folder: Path, steps: int) -> float:
    """Median step in ms of train.py as two ranks without a supervisor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = environment(
            GLOO_SOCKET_IFNAME="lo", **{name: str(value) for name, value in place.items()}
        )
        command = [sys.executable, "train.py", CONFIG, *flags(folder, steps)]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [rank.communicate()[1] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("the run without a supervisor failed:\n" + "\n".join(errors)[-2000:])
    return step_ms(RunDir(folder / "run"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=600)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        beat = statistics.median(beat_ns(Path(place)) for _ in range(5))
    ratios, cpu, steps = [], [], []
    for number in tqdm(range(wanted.rounds), unit="round", disable=None):
        found = {}
        # neither always comes first
        for way in ("watched", "alone") if number % 2 else ("alone", "watched"):
            with tempfile.TemporaryDirectory() as place:
                if way == "watched":
                    found[way], share = watched(Path(place), wanted.steps)
                    cpu.append(share)
                else:
                    found[way] = alone(Path(place), wanted.steps)
        ratios.append(found["watched"] / found["alone"])
        steps.append(found["watched"])
    step = statistics.median(steps)
    beats = len(heartbeat.STEP_PHASES)
    share = 100 * beats * beat / 1e6 / step
    print(
        f"step, supervised : alone  {statistics.median(ratios):.4f}   "
        f"({min(ratios):.4f}–{max(ratios):.4f})"
    )
    print(
        f"one heartbeat             {beat:.0f} ns; {beats} of them are {share:.3f} % of a step of "
        f"{step:.2f} ms"
    )
    print(f"CPU of the supervisor     {100 * statistics.median(cpu):.2f} % of one core")


if __name__ == "__main__":
    main()
