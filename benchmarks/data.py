"""Batches and epochs: Duet against torch's DataLoader with DistributedSampler, and nanoGPT's
get_batch.

    python -m benchmarks.data [--rounds=7]

All read the same shard of random tokens, 16 sequences of 128 tokens; rounds are interleaved,
medians are printed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from training.config.batch import Batch
from training.config.schema import Config
from training.core import rundir
from training.data.loader import Batches
from training.data.permutation import EpochPermutation
from training.data.token_dataset import TokenDataset, pair
from training.inspector.distributed import World
from training.tasks.gpt.task import LanguageModel
from training.trainer.checkpoint import TrainProgress
from training.trainer.loop import begin_epoch

SEQ, SIZE, COUNT, SHARD_TOKENS = 128, 16, 300, 1 << 24
MANY = 50_000_000


def torch_loader(data: TokenDataset, workers: int) -> Iterator[Any]:
    sampler = DistributedSampler(data, 2, 0, shuffle=True, seed=1, drop_last=True)
    sampler.set_epoch(0)
    context = "fork" if workers else None
    return iter(
        DataLoader(
            data,
            SIZE,
            sampler=sampler,
            drop_last=True,
            num_workers=workers,
            multiprocessing_context=context,
        )
    )


def get_batch(path: Path) -> Iterator[Any]:
    """As in nanoGPT's train.py: random places, one slice each."""
    while True:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - SEQ, (SIZE,))
        inputs = torch.stack([torch.from_numpy(data[i : i + SEQ].astype(np.int64)) for i in places])
        targets = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + SEQ].astype(np.int64)) for i in places]
        )
        yield inputs, targets


def per_batch(batches: Iterator[Any]) -> float:
    """Milliseconds per batch, without the first one, which starts workers or draws the order."""
    next(batches)
    started = time.perf_counter()
    for _ in range(COUNT):
        next(batches)
    return 1000 * (time.perf_counter() - started) / COUNT


def first_index(sampler: Callable[[], Any]) -> float:
    started = time.perf_counter()
    sampler()
    return 1000 * (time.perf_counter() - started)


class Many:
    """A dataset with the length of a large corpus, for samplers."""

    def __len__(self) -> int:
        return MANY


def torch_start() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(
        Many(), 2, 0, shuffle=True, seed=1, drop_last=True
    )  # type: ignore[arg-type]
    next(iter(sampler))


class Switch:
    """The engine's complete protocol between two epochs, for one process."""

    def __init__(self, batches: Batches, folder: Path) -> None:
        config, run = Config(device="cpu"), rundir.RunDir(folder)
        steps = len(batches.dataset) // batches.step_sequences
        world = World(0, 0, 1, torch.device("cpu"), "none", "-")
        self.session: Any = SimpleNamespace(
            config=config,
            run=run,
            world=world,
            batches=batches,
            batch=batches.batch,
            task=LanguageModel,
        )
        self.session.steps_left, self.session.barrier_s = lambda position: steps, 60.0
        gc.collect()
        gc.freeze()  # as train() does

    def __call__(self) -> None:
        next(begin_epoch(self.session, TrainProgress(epoch=1)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds after one warm-up"
    )
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(2):
            paths.append(Path(folder, f"train_{number:05d}.bin"))
            np.random.default_rng(number).integers(0, 257, SHARD_TOKENS).astype("<u2").tofile(
                paths[-1]
            )
        one, two = TokenDataset(paths[:1], SEQ), TokenDataset(paths, SEQ)
        batch = Batch(SIZE, SEQ, 2, 1)

        def duet(data: TokenDataset, workers: int = 0) -> Batches:
            return Batches(
                data, batch, rank=0, seed=1, workers=workers, persistent=False, arrive=pair
            )

        alone = Batch(SIZE, SEQ, 1, 1)
        switch = Switch(
            Batches(one, alone, rank=0, seed=1, workers=0, persistent=False, arrive=pair),
            Path(folder),
        )
        for number in tqdm(range(rounds + 1), unit="round", disable=None):
            if number == 1:
                found.clear()
            held = [duet(one), duet(two), duet(one, 2)]
            note("a batch: Duet, one shard", per_batch(held[0].epoch(0, 0)))
            note("a batch: Duet, two shards", per_batch(held[1].epoch(0, 0)))
            note("a batch: Duet, 2 workers", per_batch(held[2].epoch(0, 0)))
            note("a batch: nanoGPT get_batch", per_batch(get_batch(paths[0])))
            note("a batch: DataLoader, 0 workers", per_batch(torch_loader(one, 0)))
            note("a batch: DataLoader, 2 workers", per_batch(torch_loader(one, 2)))
            note(
                "new epoch, 131072 sequences: Duet",
                first_index(lambda: next(held[0].epoch(1, 0))),  # noqa: B023
            )
            note(
                "new epoch, 131072 sequences: torch",
                first_index(lambda: next(torch_loader(one, 0))),
            )
            note("new epoch, the whole switch: Duet", first_index(switch))
            note(
                "start at 50 M sequences: Duet",
                first_index(lambda: EpochPermutation(MANY, 1, 0).indices(0, 4096)),
            )
            note("start at 50 M sequences: torch", first_index(torch_start))
            held[2].close()
    print(f"{'':<36}{'median':>12}{'min':>12}{'max':>12}")
    for name, values in found.items():
        print(
            f"{name:<36}{statistics.median(values):10.4f}ms{min(values):10.4f}ms{max(values):10.4f}ms"
        )


if __name__ == "__main__":
    main()
