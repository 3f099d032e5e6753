"""Cost of checkpoints: wall time with many saves against none, per save and as a share of the
training at the default interval.

    python -m benchmarks.checkpoints [--rounds=5] [--ranks=1,2] [--depth=4]

Runs launch_train.sh in interleaved rounds; the time between two recorded steps includes the
snapshot on the training thread and the load of the writing thread.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.config.schema import Config
from training.core.rundir import RunDir, read_records

SKIPPED, STEPS, EVERY = 10, 90, 20


def seconds(folder: Path, ranks: int, depth: int, every: int) -> tuple[float, int]:
    """(wall seconds of the steps after the warm-up, bytes of a checkpoint)."""
    flags = {
        "device": "cpu",
        "depth": depth,
        "max_seq_len": 256,
        "device_batch_size": 8,
        "total_batch_size": 2048 * ranks,
    }
    flags |= {
        "num_iterations": SKIPPED + STEPS,
        "save_every": every,
        "eval_every": 0,
        "sample_tokens": 0,
        "tensorboard": False,
    }
    flags |= {
        "out_dir": folder,
        "log_dir": folder,
        "run_name": "run",
        "use_dummy_wandb": True,
        "keep_checkpoints": 10,
    }
    argv = [
        "./launch_train.sh",
        str(ranks),
        "configs/dual_gpu/quickstart.py",
        *(f"--{k}={v}" for k, v in flags.items()),
    ]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
    run = RunDir(folder / "run")
    times = {r["step"]: r["time"] for r in read_records(run.metrics)}
    size = next(run.checkpoints.glob("step_*/state.pt")).stat().st_size
    shutil.rmtree(run.path)
    # the training waits for the save of the last step
    return times[SKIPPED + STEPS - 1] - times[SKIPPED], size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    saves = len([s for s in range(SKIPPED + 1, SKIPPED + STEPS) if s % EVERY == 0])
    print(f"{'ranks':>5}{'MB':>7}{'step ms':>9}{'ms/save':>11}{'share every':>13}")
    for ranks in map(int, args.ranks.split(",")):
        found: dict[int, list[float]] = {0: [], EVERY: []}
        size = 0
        with tempfile.TemporaryDirectory() as folder:
            for _ in tqdm(range(args.rounds), unit="round", disable=None):
                for every, values in found.items():
                    value, size = seconds(Path(folder), ranks, args.depth, every)
                    values.append(value)
        without, with_saves = statistics.median(found[0]), statistics.median(found[EVERY])
        step, cost = without / (STEPS - 1), (with_saves - without) / saves
        share = cost / (Config.save_every * step)
        print(
            f"{ranks:5}{size / 1e6:7.0f}{step * 1000:9.1f}{cost * 1000:11.1f}{share:8.2%} / "
            f"{Config.save_every}"
        )


if __name__ == "__main__":
    main()
