"""Time from a fault to the resumed training with `--retries`, on two CPU ranks.

    python -m benchmarks.recovery [--rounds=3]

The time is from the last progress before the fault to the first new step after the restart: it
includes detection, stopping and starting the ranks, reading and verifying the checkpoint. Hangs are
detected after 3 s (`--hang_timeout=3`), as in the other fault benchmarks.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.core.rundir import RunDir, read_json, read_records

CONFIG = "configs/dual_gpu/quickstart.py"
SHAPE = {
    "depth": 1,
    "max_seq_len": 32,
    "device_batch_size": 4,
    "total_batch_size": 256,
    "num_iterations": 60,
    "save_every": 10,
}
QUIET = {
    "eval_every": 0,
    "device": "cpu",
    "use_dummy_wandb": "true",
    "tensorboard": "false",
    "report": "false",
    "hang_timeout": 3,
}
FAULTS = {
    "SIGKILL": "kill@rank=1,step=24",
    "a lock that is never released": "sleep@rank=0,step=24",
    "out of GPU memory (injected)": "oom@rank=1,step=24,above=2",
    "a killed data-loader worker": "worker_kill@rank=0,call=24",
}


def once(fault: str) -> tuple[float, int]:
    """(seconds until training resumes, steps lost)."""
    workers = {"num_workers": 1} if fault.startswith("worker") else {}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        flags = (
            SHAPE
            | QUIET
            | workers
            | {"out_dir": folder, "log_dir": folder, "run_name": "run", "inject": fault}
        )
        command = [
            "./train_dual_gpu_enhanced.sh",
            CONFIG,
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if (
            done.returncode
            or (read_json(run.summary) or {}).get("steps") != SHAPE["num_iterations"]
        ):
            raise SystemExit(f"{fault}: exit {done.returncode}\n{done.stderr[-2000:]}")
        events = list(read_records(run.events))
        restart, recovered = (
            next(e for e in events if e["event"] == name) for name in ("restart", "recovered")
        )
        return recovered["seconds"], restart["steps_lost"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    found: dict[str, list[tuple[float, int]]] = {what: [] for what in FAULTS}
    for _ in range(parser.parse_args().rounds):
        for what, fault in tqdm(FAULTS.items(), unit="fault", disable=None):
            found[what].append(once(fault))
    for what, each in found.items():
        seconds = [s for s, _ in each]
        print(
            f"{what:<30}{statistics.median(seconds):6.2f} s   "
            f"({min(seconds):.2f}–{max(seconds):.2f}), {each[-1][1]} steps lost"
        )


if __name__ == "__main__":
    main()
