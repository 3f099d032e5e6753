"""Video restoration: Duet's step against a bare loop with the same network, data and batch, and the
throughput of the loader with workers.

    python examples/make_blur_video.py
    python -m benchmarks.video [--rounds=5] [--steps=80] [--ranks=1,2]

Rounds are interleaved; medians of each round's median step are printed. The bare loop is
benchmarks/contenders/video.py, under torchrun for two ranks.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import ROOT, environment, measured
from training.config import loader
from training.config.batch import Batch
from training.core.rundir import RunDir, read_records
from training.data.loader import Batches
from training.tasks.base import Samples
from training.tasks.video_restoration.dataset import Training
from training.tasks.video_restoration.options import VideoOptions

CONFIG, SKIPPED = "configs/video/quickstart.py", 10


def duet(ranks: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "device": "cpu",
            "num_iterations": steps,
            "eval_every": 0,
            "save_every": 0,
            "tensorboard": "false",
            "report": "false",
        }
        flags |= {
            "use_dummy_wandb": "true",
            "out_dir": folder,
            "log_dir": folder,
            "run_name": "run",
            "test_dataroot_gt": "",
        }
        argv = [
            "./launch_train.sh",
            str(ranks),
            CONFIG,
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        done = subprocess.run(
            argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(argv)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
        return statistics.median(
            r["step_ms"]
            for r in read_records(RunDir(Path(folder) / "run").metrics)
            if r["step"] > SKIPPED
        )


def bare(ranks: int, steps: int, options: VideoOptions) -> float:
    words = [
        str(steps),
        str(SKIPPED),
        *(f"{name}={value}" for name, value in asdict(options).items()),
    ]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    return float(
        measured([sys.executable, *launcher, "benchmarks/contenders/video.py", *words])[0].split()[
            -1
        ]
    )


def samples_per_s(options: VideoOptions, workers: int, seconds: float = 4.0) -> float:
    """Samples/s of one rank's loader on otherwise idle cores."""
    data = Samples(Training(options), 1, drawn=True)
    batches = Batches(
        data, Batch(2, 1, 1, 1), rank=0, seed=1, workers=workers, persistent=workers > 0
    )
    count, begun, epoch = 0, 0.0, 0
    while not begun or time.perf_counter() < begun + seconds:
        for _ in batches.epoch(epoch, 0):
            begun = (
                begun or time.perf_counter()
            )  # the first batch includes the start of the workers
            count += 2
            if time.perf_counter() > begun + seconds:
                break
        epoch += 1
    rate = (count - 2) / (time.perf_counter() - begun)
    batches.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    values, _ = loader.load(ROOT / CONFIG)
    options = VideoOptions(
        **{
            name: value
            for name, (value, _) in values.items()
            if name in VideoOptions.__dataclass_fields__
        }
    )
    if not Path(options.dataroot_gt).is_dir():
        sys.exit(f"{options.dataroot_gt} is missing; create it: python examples/make_blur_video.py")
    torch.set_num_threads(1)
    rates = {workers: [samples_per_s(options, workers) for _ in range(3)] for workers in (0, 1, 2)}
    print(
        "loader alone, samples/s: "
        + ", ".join(f"{w} workers {statistics.median(r):.0f}" for w, r in rates.items())
    )
    for ranks in map(int, args.ranks.split(",")):
        found = [
            (duet(ranks, args.steps), bare(ranks, args.steps, options))
            for _ in tqdm(range(args.rounds), disable=None)
        ]
        mine, theirs = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = sorted(a / b for a, b in found)
        print(
            f"{ranks} rank{'s' if ranks > 1 else ''}: Duet {mine:.1f} ms, bare loop {theirs:.1f} "
            f"ms: "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
