"""Cost of an epoch switch, with and without persistent data-loader workers.

    python -m benchmarks.epochs [--ranks=2,4] [--workers=0,1,2] [--epochs=300]

Runs launch_train.sh with a small task (examples/spirals.py) of four steps per epoch. A switch is
the time between the last step of an epoch and the first one of the next, minus the median of all
other steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, environment
from training.core.rundir import RunDir, read_records

# an epoch's steps, samples of a rank and step, epochs that do not count
STEPS, SIZE, WARM_UP = (
    4,
    16,
    5,
)


def switches(
    folder: Path, ranks: int, workers: int, persistent: bool, epochs: int
) -> tuple[float, float, float]:
    """(median ms of a switch, its 95th percentile, seconds of the whole run)."""
    flags = {
        "task": "examples/spirals.py",
        "device": "cpu",
        "points": STEPS * SIZE * ranks,
        "device_batch_size": SIZE,
    }
    flags |= {
        "num_epochs": epochs,
        "eval_every": 0,
        "save_every": 0,
        "inspect_every": 0,
        "tensorboard": "false",
        "report": "false",
    }
    flags |= {
        "num_workers": workers,
        "persistent_workers": str(persistent).lower(),
        "use_dummy_wandb": "true",
        "log_every": 10_000,
    }
    flags |= {"out_dir": folder, "log_dir": folder, "run_name": f"{ranks}-{workers}-{persistent}"}
    argv = [
        "./launch_train.sh",
        str(ranks),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    begun = time.monotonic()
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    records = list(read_records(RunDir(folder / str(flags["run_name"])).metrics))
    steps: list[float] = []  # ms
    crossings: list[float] = []
    for before, now in itertools.pairwise(records):
        if now["epoch"] > WARM_UP:
            (crossings if now["epoch"] != before["epoch"] else steps).append(
                1000 * (now["time"] - before["time"])
            )
    usual = statistics.median(steps)
    costs = sorted(crossing - usual for crossing in crossings)
    return statistics.median(costs), costs[int(0.95 * len(costs))], time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=300)
    args = parser.parse_args()
    print(
        f"{'ranks':>5}{'workers':>9}{'persistent':>12}{'ms/switch':>13}{'95 %':>8}"
        f"{'switches':>10}{'run, s':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks, workers in itertools.product(
            map(int, args.ranks.split(",")), map(int, args.workers.split(","))
        ):
            for persistent in (False, True) if workers else (False,):
                median, high, seconds = switches(
                    Path(folder), ranks, workers, persistent, args.epochs
                )
                print(
                    f"{ranks:>5}{workers:>9}{persistent!s:>12}{median:>13.1f}{high:>8.1f}"
                    f"{args.epochs - 1:>10}{seconds:>8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
