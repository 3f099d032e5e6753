"""Batches of token sequences: a map-style dataset over memory-mapped shards, and each rank's share of every step."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from training.config.batch import Batch
from training.data.order import Ints, Order
from training.data.prepare import Prepared
from training.errors import Exit, Problem, UserError
from training.host import process

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64
# Positions whose sequences are computed together: 0.3 ms for some hundred batches.
BLOCK = 4096
CPU = torch.device("cpu")


class TokenDataset(Dataset[Pair]):
    """Sequence i is tokens [i·T, i·T+T) with the next token of each as its target; it may cross a border of shards.

    `sizes`: tokens that each shard must have. Raises UserError, with the shard's name, for one that is lost or has another size.
    """

    def __init__(self, paths: Sequence[Path], seq_len: int, *, token_bytes: int = 2, sizes: Sequence[int] | None = None) -> None:
        self.seq_len = seq_len
        self.paths = tuple(paths)
        kind = np.dtype(f"<u{token_bytes}")
        self._shards = [_open(path, kind, sizes[i] if sizes else None) for i, path in enumerate(paths)]
        self._firsts = [0]  # the first token of each shard
        for shard in self._shards:
            self._firsts.append(self._firsts[-1] + len(shard))
        self._length = max(0, self._firsts[-1] - 1) // seq_len
        # The usual case: all sequences as the rows of one view, so a batch is one copy of whole rows.
        self._rows: npt.NDArray[Any] | None = None
        if len(self._shards) == 1 and self._length:
            tokens = self._shards[0]
            strides = (seq_len * tokens.itemsize, tokens.itemsize)
            self._rows = np.lib.stride_tricks.as_strided(tokens, (self._length, seq_len + 1), strides, writeable=False)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int] | Ints) -> Pair:
        """Sequences as (len(indices), T) inputs and targets, int64."""
        return pair(self.rows(indices))

    def rows(self, indices: Sequence[int] | Ints) -> torch.Tensor:
        """Sequences with the token after each, (len(indices), T+1) int64."""
        if self._rows is not None:
            return torch.from_numpy(self._rows[indices].astype(np.int64))
        width = self.seq_len + 1
        out, firsts, opened = np.empty((len(indices), width), np.int64), self._firsts, self._shards
        for number, index in enumerate(np.asarray(indices).tolist()):
            if not 0 <= index < self._length:
                raise IndexError(f"sequence {index} of {self._length}")
            start = index * self.seq_len
            shard = bisect_right(firsts, start) - 1
            start -= firsts[shard]
            part = opened[shard][start : start + width]
            if len(part) == width:
                out[number] = part
            else:
                self._copy(index * self.seq_len, out[number])
        return torch.from_numpy(out)

    def _copy(self, start: int, row: Ints) -> None:
        """Tokens from `start` on, out of as many shards as it takes."""
        number, done = bisect_right(self._firsts, start) - 1, 0
        while done < len(row):
            part = self._shards[number][start + done - self._firsts[number] :][: len(row) - done]
            row[done : done + len(part)] = part
            done, number = done + len(part), number + 1


def dataset(data: Prepared, part: str, seq_len: int) -> TokenDataset:
    """The dataset of a part ("train" or "val") of a prepared corpus; the shards' sizes are checked (UserError)."""
    paths = data.train if part == "train" else data.val
    return TokenDataset(paths, seq_len, token_bytes=data.token_bytes, sizes=data.sizes(part))


def pair(rows: torch.Tensor) -> Pair:
    return rows[:, :-1], rows[:, 1:]


def to_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Whole rows, before they are made a pair: parts of rows are not contiguous, and would be copied through pageable memory."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


def _open(path: Path, kind: np.dtype[Any], tokens: int | None) -> npt.NDArray[Any]:
    fixes = [f"rm -r {path.parent}"]
    try:
        size = path.stat().st_size
    except OSError as error:
        what = f"the shard {path} can not be read: {error.strerror}"
        raise UserError(Problem(what, "the shards as they were prepared; the next start makes them again", fixes), Exit.RESOURCES) from None
    expected = size // kind.itemsize * kind.itemsize if tokens is None else tokens * kind.itemsize
    if size != expected:
        what = f"the shard {path} has {size} bytes, not {expected}: it was changed or cut after it was prepared"
        raise UserError(Problem(what, "the shards as they were prepared; the next start makes them again", fixes), Exit.RESOURCES)
    # The plain array below the memmap: slicing that one costs a fraction.
    return np.asarray(np.memmap(path, dtype=kind, mode="r")) if size else np.zeros(0, kind)


class Batches:
    """This rank's micro-batches. Step after step, all ranks together take the next G sequences of the epoch's order:
    micro-batch m of rank r the B ones from (m·W + r)·B on. So a step has the same samples for every number of ranks.

    They arrive on `device`; to a GPU without waiting. Nothing here starts a thread; with `workers` torch's DataLoader reads ahead.
    """

    def __init__(
        self, dataset: TokenDataset, batch: Batch, *, rank: int, seed: int, workers: int, persistent: bool, device: torch.device = CPU
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.rank = rank
        self.seed = seed
        self.device = device
        self.step_sequences = batch.total_tokens // batch.seq_len  # G
        self._sampler = _Share(batch, rank, seed, len(dataset))
        # What keeps workers alive stands here and nowhere else. They ignore SIGTERM, by which multiprocessing would end them
        # when the program ends, and wait for them for ever: so they are let go before.
        self._held: dict[str, Any] = {}
        self._ends = weakref.finalize(self, self._held.clear)
        if workers:
            self._held["loader"] = DataLoader(
                _Rows(dataset),
                batch_size=None,  # the sampler gives whole batches
                sampler=self._sampler,
                num_workers=workers,
                persistent_workers=persistent,
                worker_init_fn=start_worker,
                # A private generator: creating an iterator must not shift the global random state (exact resume).
                generator=torch.Generator().manual_seed(seed + rank & (1 << 63) - 1),
                # Restarting two workers costs 30 ms with fork and 700–1200 ms otherwise; they touch neither CUDA nor gloo.
                multiprocessing_context="fork",
            )

    def epoch(self, number: int, used: int) -> Iterator[Pair]:
        """The micro-batches of epoch `number` (from 0), after `used` sequences of it that all ranks have trained already.

        Workers are started here, before the first batch is asked for. Ends with the last whole step.
        """
        self._sampler.epoch, self._sampler.used = number, used
        loader = self._held.get("loader")
        self._held["rows"] = None  # workers of an epoch that was left early end before new ones start
        rows = self._held["rows"] = iter(loader) if loader is not None else _Plain(self.dataset, iter(self._sampler))
        return self._pairs(weakref.ref(rows))

    def close(self) -> None:
        """End the workers; no batch can be had any more. Done by itself when the program ends."""
        self._ends()

    def indices(self, epoch: int, used: int, rank: int | None = None, steps: int = 1) -> Ints:
        """The sequences that a rank (this one) takes in the step (or so many steps) beginning at `used`: all its micro-batches
        in order, (steps·A·B,)."""
        share = _share(self.batch, self.rank if rank is None else rank, steps)
        return self.order(epoch).at(used + share.ravel())

    def order(self, epoch: int) -> Order:
        """The order of all sequences in that epoch."""
        return Order(len(self.dataset), self.seed, epoch)

    def _pairs(self, source: weakref.ref[Iterator[torch.Tensor]]) -> Iterator[Pair]:
        while (rows := source()) is not None:
            one = next(rows, None)
            del rows
            if one is None:
                return
            yield pair(to_device(one, self.device))
        raise RuntimeError("these batches were closed, or another epoch has begun")


def _share(batch: Batch, rank: int, steps: int) -> Ints:
    """Positions that a rank takes in so many steps, counted from the first one's beginning: (micro-batches, B)."""
    micro = np.arange(steps * batch.accumulation, dtype=np.int64)
    first = (micro * batch.world_size + rank) * batch.device_sequences
    return first[:, None] + np.arange(batch.device_sequences, dtype=np.int64)


class _Plain:
    """Rows without workers."""

    def __init__(self, dataset: TokenDataset, indices: Iterator[Ints]) -> None:
        self.dataset, self.indices = dataset, indices

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        return self.dataset.rows(next(self.indices))


class _Share:
    """A sampler: the sequences of each micro-batch of a rank, from `used` to the end of the epoch, computed in blocks."""

    def __init__(self, batch: Batch, rank: int, seed: int, count: int) -> None:
        self.batch, self.rank, self.seed, self.count = batch, rank, seed, count
        self.step_sequences = batch.total_tokens // batch.seq_len
        self.epoch = self.used = 0

    def __len__(self) -> int:
        return max(0, self.count - self.used) // self.step_sequences * self.batch.accumulation

    def __iter__(self) -> Iterator[Ints]:
        order, batch = Order(self.count, self.seed, self.epoch), self.batch
        per_block = max(1, BLOCK // (batch.accumulation * batch.device_sequences))
        start, left = self.used, len(self) // batch.accumulation
        while left:
            steps = min(left, per_block)
            yield from order.at(start + _share(batch, self.rank, steps))
            start, left = start + steps * self.step_sequences, left - steps


class _Rows(Dataset[torch.Tensor]):
    """What workers read: a whole batch for the indices of one."""

    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return self.dataset.rows(indices)

    def __len__(self) -> int:
        return len(self.dataset)


def start_worker(worker: int) -> None:
    """A data-loader worker dies with its rank, leaves signals to it, and uses one thread."""
    process.die_with_parent()
    process.ignore_stop_signals()
    torch.set_num_threads(1)
