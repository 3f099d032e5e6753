"""Batches of token sequences: a map-style dataset over a memory-mapped shard, sampled per rank and epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from training.host import process

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64


class TokenDataset(Dataset[Pair]):
    """Sequence i is tokens [i·T, i·T+T) with the next token of each as its target."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.tokens = np.memmap(path, dtype="<u2", mode="r") if path.stat().st_size else np.zeros(0, "<u2")
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> Pair:
        """Used by DataLoader's fetcher instead of len(indices) single reads."""
        return self.batch(indices)

    def batch(self, indices: list[int]) -> Pair:
        """Sequences as (len(indices), T) inputs and targets."""
        starts = [i * self.seq_len for i in indices]
        rows = torch.from_numpy(np.stack([self.tokens[s : s + self.seq_len + 1] for s in starts]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def as_fetched(batch: Pair) -> Pair:
    """The dataset gives whole batches: nothing to collate. A module function: workers need to find it by name."""
    return batch


class EpochSampler(DistributedSampler[Pair]):
    """DistributedSampler that can start in the middle of an epoch (resume)."""

    start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """`start`: samples of this rank that an earlier process has used already."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


def start_worker(worker: int) -> None:
    """A data-loader worker dies with its rank, leaves signals to it, and uses one thread."""
    process.die_with_parent()
    process.ignore_stop_signals()
    torch.set_num_threads(1)


def train_loader(
    dataset: TokenDataset, *, rank: int, world_size: int, batch: int, seed: int, workers: int, persistent: bool, pin: bool
) -> tuple[DataLoader[Pair], EpochSampler]:
    """The loader of this rank; the caller sets the sampler's epoch before each iteration."""
    sampler = EpochSampler(dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(
        dataset,
        batch_size=batch,
        sampler=sampler,
        drop_last=True,
        num_workers=workers,
        persistent_workers=persistent,
        collate_fn=as_fetched,
        worker_init_fn=start_worker if workers else None,
        pin_memory=pin,
        # A private generator: creating an iterator must not shift the global random state (exact resume).
        generator=torch.Generator().manual_seed(seed + rank),
        # Restarting two workers costs 30 ms with fork and 700–1200 ms otherwise; they touch neither CUDA nor gloo.
        multiprocessing_context="fork" if workers else None,
    )
    return loader, sampler
