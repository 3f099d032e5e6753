"""Each rank's share of every step: the same samples for any number of ranks and workers."""

from __future__ import annotations

import functools
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.config.batch import Batch
from training.data.batch_dataset import BatchDataset
from training.data.permutation import EpochPermutation, Ints
from training.host import process

# Positions whose sequences are computed together: 0.3 ms for some hundred batches.
BLOCK = 4096
Key = tuple[int, Ints | Sequence[int]]  # epoch and indices of a micro-batch


def as_it_is(batch: Any) -> Any:
    return batch


class Batches:
    """Micro-batches of this rank. In each step all ranks together take the next G sequences of the
    epoch's order: micro-batch m of rank r takes the B sequences from (m·W + r)·B on. A step
    therefore has the same samples for any number of ranks.

    `arrive` turns a row batch into the model's input on its device. No threads are started here;
    with `workers`, torch's DataLoader reads ahead.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        batch: Batch,
        *,
        rank: int,
        seed: int,
        workers: int,
        persistent: bool,
        arrive: Callable[[Any], Any] = as_it_is,
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.rank = rank
        self.seed = seed
        self.arrive = arrive
        self.step_sequences = batch.total_tokens // batch.seq_len  # G
        self._sampler = _Share(batch, rank, seed, len(dataset))
        # The only reference that keeps workers alive. They ignore SIGTERM, which multiprocessing
        # uses to end them at exit before it waits for them without limit, so they are released
        # earlier.
        self._held: dict[str, Any] = {}
        self._ends = weakref.finalize(self, self._held.clear)
        if workers:
            self._held["loader"] = DataLoader(
                _Rows(dataset),
                batch_size=None,  # the sampler returns whole batches
                sampler=self._sampler,
                num_workers=workers,
                persistent_workers=persistent,
                worker_init_fn=functools.partial(start_worker, os.getpid()),
                # A private generator: creating an iterator must not advance the global random state
                # (exact resume).
                generator=torch.Generator().manual_seed(seed + rank & (1 << 63) - 1),
                # Restarting two workers takes 30 ms with fork, 700–1200 ms otherwise; they use
                # neither CUDA nor gloo.
                multiprocessing_context="fork",
            )

    def epoch(self, number: int, used: int) -> Iterator[Any]:
        """The micro-batches of epoch `number` (from 0) after the `used` sequences that all ranks
        have already trained.

        Starts the workers at once, before the first batch is requested. Ends with the last full
        step.
        """
        self._sampler.epoch, self._sampler.used = number, used
        loader = self._held.get("loader")
        self._held["rows"] = None  # workers of an abandoned epoch end before new ones start
        rows = self._held["rows"] = (
            iter(loader) if loader is not None else _Plain(self.dataset, iter(self._sampler))
        )
        return self._arriving(weakref.ref(rows))

    def close(self) -> None:
        """End the workers; no more batches can be read. Called automatically at exit."""
        self._ends()

    def indices(self, epoch: int, used: int, rank: int | None = None, steps: int = 1) -> Ints:
        """Sequences that a rank (default: this one) takes in `steps` steps starting at `used`: all
        its micro-batches in order, (steps·A·B,)."""
        share = _share(self.batch, self.rank if rank is None else rank, steps)
        return self.order(epoch).at(used + share.ravel())

    def order(self, epoch: int) -> EpochPermutation:
        """The order of all sequences in an epoch."""
        return EpochPermutation(len(self.dataset), self.seed, epoch)

    def _arriving(self, source: weakref.ref[Iterator[Any]]) -> Iterator[Any]:
        while (rows := source()) is not None:
            one = next(rows, None)
            del rows
            if one is None:
                return
            yield self.arrive(one)
        raise RuntimeError("the batches were closed, or another epoch has started")


@contextmanager
def reading(dataset: BatchDataset, keys: Sequence[Key], *, workers: int) -> Iterator[Iterator[Any]]:
    """The rows of these keys, outside of the epochs. In a run with workers others than theirs read,
    which end with the context: a dataset may open a file at its first access. Workers forked from a
    rank that has it open would share its position."""
    if dataset.most_readers is not None:
        workers = min(workers, dataset.most_readers)
    if not workers:
        yield _Plain(dataset, iter(keys))
        return
    rows: Any = iter(
        DataLoader(
            _Rows(dataset),
            batch_size=None,
            sampler=keys,
            num_workers=min(workers, len(keys)),
            prefetch_factor=1,  # each reads one batch while the model has another
            worker_init_fn=functools.partial(start_worker, os.getpid()),
            # as above; what the dataset draws depends on the state of the rank
            generator=torch.Generator().manual_seed(torch.initial_seed() & (1 << 63) - 1),
            multiprocessing_context="fork",
        )
    )
    try:
        yield rows
    finally:
        rows.__del__()  # ends the workers; the traceback of an error would keep them alive


def _share(batch: Batch, rank: int, steps: int) -> Ints:
    """Positions that a rank takes in `steps` steps, relative to the start of the first:
    (micro-batches, B)."""
    micro = np.arange(steps * batch.accumulation, dtype=np.int64)
    first = (micro * batch.world_size + rank) * batch.device_sequences
    return first[:, None] + np.arange(batch.device_sequences, dtype=np.int64)


class _Plain:
    """Rows read without workers."""

    def __init__(self, dataset: BatchDataset, keys: Iterator[Key]) -> None:
        self.dataset, self.keys = dataset, keys

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        epoch, indices = next(self.keys)
        return self.dataset.rows(indices, epoch)


class _Share:
    """Sampler of a rank: the sequences of each micro-batch, from `used` to the end of the epoch,
    computed in blocks."""

    def __init__(self, batch: Batch, rank: int, seed: int, count: int) -> None:
        self.batch, self.rank, self.seed, self.count = batch, rank, seed, count
        self.step_sequences = batch.total_tokens // batch.seq_len
        self.epoch = self.used = 0

    def __len__(self) -> int:
        return max(0, self.count - self.used) // self.step_sequences * self.batch.accumulation

    def __iter__(self) -> Iterator[Key]:
        order, batch = EpochPermutation(self.count, self.seed, self.epoch), self.batch
        per_block = max(1, BLOCK // (batch.accumulation * batch.device_sequences))
        start, left = self.used, len(self) // batch.accumulation
        while left:
            steps = min(left, per_block)
            for indices in order.at(start + _share(batch, self.rank, steps)):
                yield self.epoch, indices
            start, left = start + steps * self.step_sequences, left - steps


class _Rows(Dataset[Any]):
    """Dataset for workers: one item is a whole batch."""

    def __init__(self, dataset: BatchDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        epoch, indices = key
        return self.dataset.rows(indices, epoch)

    def __len__(self) -> int:
        return len(self.dataset)


def start_worker(rank_pid: int, worker: int) -> None:
    """Initialize a data-loader worker: it exits with its rank (even one that died during the fork),
    leaves signals to the rank and uses one thread."""
    process.die_with_parent(rank_pid)
    # Unlike an ignored signal, a handler is not passed on to the programs that a data set starts:
    # it may end them. It interrupts no read in C code.
    for number in process.STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    torch.set_num_threads(1)
