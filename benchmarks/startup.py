"""Time from the command to the first step: the launcher with all features on, against plain Python
in one process and bare torchrun.

    python -m benchmarks.startup [--rounds=7]

The same train.py and configuration; rounds are interleaved, medians and their ratios are printed.
The time is from the start of the command to the record of step 1 in metrics.jsonl; --help and
--dry_run are timed as whole commands.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from training.core.rundir import read_records

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/dual_gpu/quickstart.py"
FLAGS = [
    "--device=cpu",
    "--depth=2",
    "--max_seq_len=64",
    "--device_batch_size=4",
    "--total_batch_size=512",
    "--num_iterations=2",
]
FLAGS += ["--eval_every=0", "--sample_tokens=0", "--report=false"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WAYS = {
    "plain python, 1 rank": [sys.executable, "train.py", CONFIG],
    "launch_train.sh, 1 rank": ["./launch_train.sh", "1", CONFIG],
    "launch_train.sh, 2 ranks": ["./launch_train.sh", "2", CONFIG],
    "torchrun, 2 ranks": [
        *TORCHRUN,
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
        f"--config={CONFIG}",
    ],
}
COMMANDS = {
    "--help": ["./train_dual_gpu.sh", "--help"],
    "--dry_run": ["./train_dual_gpu.sh", CONFIG, "--dry_run"],
}
BASE = "plain python, 1 rank"


def first_step(argv: list[str], folder: Path) -> float:
    """Seconds from the start of the command to its first recorded step."""
    run = folder / "run"
    flags = [*FLAGS, f"--out_dir={folder}", f"--log_dir={folder}", "--run_name=run"]
    threads = (
        {}
        if "2" in argv or "train.py" not in argv or "torch.distributed.run" in argv
        else {"OMP_NUM_THREADS": "1"}
    )
    started = time.time()
    done = subprocess.run(
        [*argv, *flags],
        cwd=ROOT,
        env=os.environ | threads,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
    seconds = float(next(read_records(run / "metrics.jsonl"))["time"]) - started
    shutil.rmtree(run)
    return seconds


def whole(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds after one warm-up"
    )
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in [*WAYS, *COMMANDS]}
    with tempfile.TemporaryDirectory() as folder:
        for number in tqdm(range(rounds + 1), unit="round", disable=None):
            for name, argv in WAYS.items():
                value = first_step(argv, Path(folder))
                if number:
                    seconds[name].append(value)
            for name, argv in COMMANDS.items():
                value = whole(argv)
                if number:
                    seconds[name].append(value)
    base = statistics.median(seconds[BASE])
    print(f"{'command to first step':<28}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}")
    for name in WAYS:
        median = statistics.median(seconds[name])
        print(
            f"{name:<28}{median:8.2f}s{min(seconds[name]):8.2f}s"
            f"{max(seconds[name]):8.2f}s{median / base:8.2f}"
        )
    for name in COMMANDS:
        values = [1000 * s for s in seconds[name]]
        print(
            f"{name:<28}{statistics.median(values):7.0f}ms{min(values):7.0f}ms{max(values):7.0f}ms"
        )


if __name__ == "__main__":
    main()
