"""Time and content of the report about each fault: under Duet, and under bare torchrun.

    python -m benchmarks.faults [--rounds=3] [--limit=60] [--only=sleep,kill] [--json=FILE]

Three ways for each fault, on two CPU ranks: Duet's training with `--inject`, an unmodified script
under Duet (`--script`), and the same script under bare torchrun. Times are from the fault to the
first line that names a cause; under torchrun to its end, at most `--limit`. Hangs are detected
after 3 s (`--hang_timeout=3`); torchrun's collectives have their default of 30 minutes (gloo).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.core.rundir import RunDir, read_records
from training.host import process

SCRIPT = "tests/e2e/scripts/faulty.py"
CONFIG = "configs/dual_gpu/quickstart.py"
FLOOR_S = 3
POLL_S = 0.05
TINY: dict[str, int | str] = {
    "depth": 1,
    "max_seq_len": 32,
    "device_batch_size": 4,
    "total_batch_size": 256,
    "num_iterations": 100000,
    "eval_every": 0,
}
TINY |= {
    "device": "cpu",
    "use_dummy_wandb": "true",
    "tensorboard": "false",
    "report": "false",
    "hang_timeout": FLOOR_S,
}
# Fault → (Duet's training, the script); '' where it is not possible.
FAULTS = {
    "a lock that is never released": ("sleep@rank=0,step=20", "sleep"),
    "a lock in the progress bar, epoch 1": ("lock_tqdm@rank=0,epoch=1", ""),
    "a stuck data-loader worker": ("worker_stuck@rank=0,call=20", "worker"),
    "an endless loop": ("loop@rank=0,step=20", "spin"),
    "the GIL held in C": ("gil@rank=0,step=20", "gil"),
    "SIGSTOP": ("stop@rank=0,step=20", "stop"),
    "uninterruptible I/O": ("io@rank=0,step=20", ""),
    "a rank with fewer batches": ("", "uneven"),
    "different collectives": ("desync@rank=1,step=20", "desync"),
    "NaN on one rank": ("nan@rank=1,step=20", ""),
    "SIGKILL": ("kill@rank=0,step=20", "kill"),
    "SIGSEGV": ("segv@rank=0,step=20", "segv"),
    "exit 0 in the middle": ("exit@rank=0,step=20", "exit0"),
    "an exception": ("raise@rank=0,step=20", "raise"),
    "out of GPU memory": ("oom@rank=1,step=20", ""),
    "a killed data-loader worker": ("worker_kill@rank=0,call=20", "worker_kill"),
}
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


@dataclass(frozen=True)
class Report:
    """`seconds`: from the fault to the report; None without one within the limit."""

    seconds: float | None
    text: str


def duet(fault: str, limit_s: float) -> Report:
    workers = {"num_workers": 1} if fault.startswith("worker") else {}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        flags = (
            TINY
            | workers
            | {"out_dir": folder, "log_dir": folder, "run_name": "run", "inject": fault}
        )
        until_ended(
            [
                "./launch_train.sh",
                "2",
                CONFIG,
                *(f"--{name}={value}" for name, value in flags.items()),
            ],
            limit_s,
        )
        return _verdict(
            run,
            next((r["time"] for r in read_records(run.events) if r["event"] == "injected"), None),
        )


def script(fault: str, limit_s: float) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        flags = {"out_dir": folder, "log_dir": folder, "run_name": "run", "hang_timeout": FLOOR_S}
        output = until_ended(
            [
                "./launch_train.sh",
                "2",
                *(f"--{name}={value}" for name, value in flags.items()),
                "--script",
                SCRIPT,
                "--",
                fault,
            ],
            limit_s,
        )
        logs = output + "".join(
            log.read_text(errors="replace") for log in run.ranks.glob("rank*.log")
        )
        return _verdict(run, _fault_time(logs))


def torchrun(fault: str, limit_s: float) -> Report:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        SCRIPT,
        fault,
    ]
    output = until_ended(command, limit_s)
    began, ended = _fault_time(output), time.time()
    if "TIME LIMIT" in output:
        return Report(None, "nothing")
    cause = ROOT_CAUSE.search(output)
    lines = [line for line in output.splitlines() if line.strip()]
    blamed = (
        f"rank {cause[1]}, exit code {cause[2]}"
        if cause
        else lines[-1][:80]
        if lines
        else "nothing"
    )
    return Report(ended - began if began else None, f"{blamed}; {len(lines)} lines")


def _fault_time(text: str) -> float | None:
    found = re.search(r"FAULT (\d+\.\d+)", text)
    return float(found[1]) if found else None


def _verdict(run: RunDir, began: float | None) -> Report:
    verdict = next((r for r in read_records(run.events) if r["event"] == "verdict"), None)
    if verdict is None or began is None:
        return Report(None, "nothing")
    return Report(verdict["time"] - began, verdict["text"])


def until_ended(command: list[str], limit_s: float) -> str:
    """Output of a command; after the limit it is killed with all its processes."""
    token = process.new_token()
    env = environment(**{process.TOKEN: token}, GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryFile("w+") as out:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        end, late = time.monotonic() + limit_s, ""
        while started.poll() is None:
            if time.monotonic() > end:
                late = "TIME LIMIT"
                os.killpg(started.pid, signal.SIGKILL)
                break
            time.sleep(POLL_S)
        started.wait()
        process.sweep(token)
        out.seek(0)
        return out.read() + late


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds until torchrun is killed"
    )
    parser.add_argument("--only", default="", help="comma-separated faults of the script")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    only = set(wanted.only.split(",")) - {""}
    rows = {
        what: pair
        for what, pair in FAULTS.items()
        if not only or only & {pair[1], pair[0].partition("@")[0]}
    }
    found: dict[str, dict[str, list[Report]]] = {
        what: {"duet": [], "script": [], "torchrun": []} for what in rows
    }
    for number in range(wanted.rounds):
        for what, (own, other) in tqdm(
            rows.items(), unit="fault", desc=f"round {number + 1}", disable=None
        ):
            if own:
                found[what]["duet"].append(duet(own, wanted.limit))
            if other:
                found[what]["script"].append(script(other, wanted.limit))
                if number == 0:  # torchrun's times do not need tenths of a second
                    found[what]["torchrun"].append(torchrun(other, wanted.limit))
    for what, ways in found.items():
        print(what)
        for way, reports in ways.items():
            if reports:
                times = [r.seconds for r in reports if r.seconds is not None]
                shown = (
                    f"{statistics.median(times):6.2f} s"
                    if len(times) == len(reports)
                    else f"  > {wanted.limit:.0f} s"
                )
                print(f"    {way:<9}{shown}   {reports[-1].text}")
    if wanted.json:
        every = {
            what: {way: [asdict(t) for t in all_of_it] for way, all_of_it in ways.items()}
            for what, ways in found.items()
        }
        wanted.json.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
