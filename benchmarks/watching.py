"""Cost of the monitor: against nvitop (`make peers`) in pseudo-terminals of the same size, and its
effect on a training.

    python -m benchmarks.watching [--rounds=5] [--seconds=20] [--train_rounds=5]

Without an NVIDIA driver both read the stand-in of tests/fake_nvml, two GPUs: real NVML client code,
no real driver calls. First paint is the time from the start of the program to the first text on its
screen; CPU and memory are measured without user input. The step time is of two ranks without a
monitor and with one at 3 s and at 0.2 s, interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
from tqdm import tqdm

from benchmarks.common import PEERS, ROOT, environment
from training.core.rundir import RunDir, read_records
from training.core.units import GIB

COLUMNS, ROWS = 120, 40
MONITOR = str(ROOT / "monitor_training.sh")
CONFIG = "configs/dual_gpu/quickstart.py"
SHAPE = {
    "depth": 2,
    "max_seq_len": 64,
    "device_batch_size": 12,
    "total_batch_size": 1536,
    "num_iterations": 600,
}
QUIET = {
    "eval_every": 0,
    "sample_tokens": 0,
    "tensorboard": "false",
    "use_dummy_wandb": "true",
    "device": "cpu",
    "report": "false",
}
WARM_STEPS = 20


def driver(folder: Path) -> dict[str, str]:
    """Variables with which NVML clients find a driver: the machine's own, or the stand-in."""
    with contextlib.suppress(OSError):
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
        return {}
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-o",
            folder / "libnvidia-ml.so.1",
            ROOT / "tests/fake_nvml/fake_nvml.c",
        ],
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder)}


def watched(
    argv: list[str], sign: str, seconds: float, env: dict[str, str]
) -> tuple[float, float, float]:
    """(seconds to the first paint, share of a core, unique memory in MiB) of a program in a
    pseudo-terminal. `sign`: the text that is painted last."""
    begun = time.perf_counter()
    child = pexpect.spawn(
        argv[0],
        argv[1:],
        dimensions=(ROWS, COLUMNS),
        env=environment(TERM="xterm-256color", **env),
        timeout=30,
    )
    child.expect_exact(sign)
    first = time.perf_counter() - begun
    process = psutil.Process(child.pid)
    _drain(child, 2.0)  # one-time work
    before, since = process.cpu_times(), time.perf_counter()
    _drain(child, seconds)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / (
        time.perf_counter() - since
    )
    memory = process.memory_info().rss / (1 << 20)
    child.send("q")
    with contextlib.suppress(pexpect.TIMEOUT):
        child.expect(pexpect.EOF, timeout=5)
    child.close(force=True)
    return first, share, memory


def _drain(child: pexpect.spawn, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(pexpect.TIMEOUT):
            child.read_nonblocking(1 << 16, timeout=left)


@contextlib.contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two training ranks, stopped at the end of the block."""
    values = SHAPE | QUIET | {"out_dir": folder, "log_dir": folder, "run_name": "run"}
    command = ["./launch_train.sh", "2", CONFIG, *(f"--{k}={v}" for k, v in values.items())]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def step_ms(folder: Path, interval_s: float | None) -> float:
    """Median step of a whole run, with a monitor at this interval."""
    with training(folder) as process:
        run, child = RunDir(folder / "run"), None
        if interval_s is not None:
            while not run.plan.exists() and process.poll() is None:
                time.sleep(0.05)
            argv = [f"--run={run.path}", f"--interval={interval_s}", "--follow-exit"]
            child = pexpect.spawn(
                MONITOR,
                argv,
                dimensions=(ROWS, COLUMNS),
                env=environment(TERM="xterm-256color"),
                timeout=600,
            )
            with contextlib.suppress(pexpect.EOF):  # it ends with the run
                while True:
                    _drain(child, 0.5)
            child.close()
        if process.wait():
            sys.exit(f"the training failed ({process.returncode}): see {folder}")
    return statistics.median(
        r["step_ms"] for r in read_records(run.metrics) if r["step"] > WARM_STEPS
    )


def large_files(folder: Path) -> dict[str, list[str]]:
    """Monitor arguments for 1 GB of another program's log, and of metrics.jsonl."""
    log, metrics = folder / "big.log", folder / "big" / "metrics.jsonl"
    metrics.parent.mkdir()
    line = (
        "step {:05d}/99999 ({:.2f}%) | loss: {:.6f} | lrm: 1.00 | dt: 412.21ms | tok/sec: "
        "118,300 | mfu: 41.20 | total time: 1.00m\n"
    )
    _fill(log, (line.format(n, n / 1000, 3 + 5 / (n + 1)) for n in range(200_000)))
    record = {
        "time": 1.0,
        "epoch": 1,
        "loss": 2.5,
        "lr": 0.01,
        "grad_norm": 0.5,
        "tokens_per_s": 38_000.0,
        "step_ms": 100.0,
    }
    _fill(metrics, (json.dumps({"step": n, **record}) + "\n" for n in range(200_000)))
    return {
        "log of another program": [f"--log={log}"],
        "metrics.jsonl": [f"--run={metrics.parent}"],
    }


def _fill(path: Path, lines: Iterator[str]) -> None:
    block = "".join(lines).encode()
    with path.open("wb") as file:
        while file.tell() < 1e9:
            file.write(block)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--train_rounds", type=int, default=5)
    wanted = parser.parse_args()
    if shutil.disk_usage(tempfile.gettempdir()).free < 3 * GIB:
        sys.exit(
            f"{tempfile.gettempdir()} has less than 3 GiB free: TMPDIR=/another/folder python -m "
            f"benchmarks.watching"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        nvml = driver(folder)
        if wanted.rounds:
            compare(folder, nvml, wanted.rounds, wanted.seconds)
        for name, argv in large_files(folder).items() if wanted.rounds else ():
            opened = [watched([MONITOR, *argv], "q quit", 0.5, nvml) for _ in range(wanted.rounds)]
            print(
                f"1 GB, {name:<24} first paint {statistics.median(o[0] for o in opened):.2f} s, "
                f"{max(o[2] for o in opened):.0f} MiB"
            )
    if wanted.train_rounds:
        cost(wanted.train_rounds)


def compare(folder: Path, nvml: dict[str, str], rounds: int, seconds: float) -> None:
    shown = folder / "shown"
    with training(shown) as process:
        process.wait()
    nvitop = {**nvml, "PYTHONPATH": str(PEERS)}
    ways = {
        "monitor, every 3 s": ([MONITOR, f"--run={shown / 'run'}", "--interval=3"], "q quit", nvml),
        "monitor, every 1 s": ([MONITOR, f"--run={shown / 'run'}", "--interval=1"], "q quit", nvml),
        "nvitop, every 1 s": (
            [sys.executable, "-m", "nvitop", "--monitor", "full"],
            "NVITOP",
            nvitop,
        ),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in tqdm(range(rounds), unit="round", disable=None):
        for name, (argv, sign, env) in ways.items():
            found[name].append(watched(argv, sign, seconds, env))
    for name, values in found.items():
        first, share, memory = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"{name:<20} first paint {first:.3f} s   {100 * share:.2f} % of a core   {memory:.1f} "
            f"MiB resident"
        )
    print(
        "GPUs: "
        + ("the stand-in of tests/fake_nvml" if nvml else "this machine's")
        + f"; {os.cpu_count()} cores"
    )


def cost(rounds: int) -> None:
    ratios: dict[float, list[float]] = {3.0: [], 0.2: []}
    for number in tqdm(range(rounds), unit="round", disable=None):
        order: list[float | None] = [None, 3.0, 0.2]
        steps = {}
        for way in order[number % 3 :] + order[: number % 3]:  # alternating order
            with tempfile.TemporaryDirectory() as place:
                steps[way] = step_ms(Path(place), way)
        for interval, values in ratios.items():
            values.append(steps[interval] / steps[None])
    for interval, values in ratios.items():
        print(
            f"step, watched every {interval:g} s : unwatched   {statistics.median(values):.4f}   "
            f"({min(values):.4f}–{max(values):.4f})"
        )


if __name__ == "__main__":
    main()
