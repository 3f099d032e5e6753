"""Token sequences: a map-style dataset over memory-mapped shards."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.data import device_copy, mapped_file
from training.data.batch_dataset import BatchDataset
from training.data.permutation import Ints
from training.data.prepared_corpus import PreparedCorpus

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64


class TokenDataset(BatchDataset, Dataset[Pair]):
    """Sequence i is the tokens [i·T, i·T+T), each with the next token as its target; it may span
    several shards.

    `sizes`: expected tokens per shard. Raises UserError with the shard's name if one is missing or
    has another size.
    """

    most_readers = 0  # reading mapped memory takes less time than passing it on

    def __init__(
        self,
        paths: Sequence[Path],
        seq_len: int,
        *,
        token_bytes: int = 2,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.paths = tuple(paths)
        kind = np.dtype(f"<u{token_bytes}")
        self._shards = [
            _open(path, kind, sizes[i] if sizes else None) for i, path in enumerate(paths)
        ]
        self._firsts = [0]  # index of the first token of each shard
        for shard in self._shards:
            self._firsts.append(self._firsts[-1] + len(shard))
        self._length = max(0, self._firsts[-1] - 1) // seq_len
        # The usual case: all sequences are rows of one view, so a batch is one copy of whole rows.
        self._rows: npt.NDArray[Any] | None = None
        if len(self._shards) == 1 and self._length:
            tokens = self._shards[0]
            strides = (seq_len * tokens.itemsize, tokens.itemsize)
            self._rows = np.lib.stride_tricks.as_strided(
                tokens, (self._length, seq_len + 1), strides, writeable=False
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int] | Ints) -> Pair:
        """Sequences as inputs and targets, (len(indices), T) int64 each."""
        return pair(self.rows(indices))

    def rows(self, indices: Sequence[int] | Ints, epoch: int = 0) -> torch.Tensor:
        """Sequences plus the following token, (len(indices), T+1) int64."""
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
        """Copy tokens from `start` on, across shards, into `row`."""
        number, done = bisect_right(self._firsts, start) - 1, 0
        while done < len(row):
            part = self._shards[number][start + done - self._firsts[number] :][: len(row) - done]
            row[done : done + len(part)] = part
            done, number = done + len(part), number + 1


def dataset(data: PreparedCorpus, part: str, seq_len: int) -> TokenDataset:
    """Dataset of one part ("train" or "val") of a prepared corpus. Raises UserError if a shard has
    the wrong size."""
    paths = data.train if part == "train" else data.val
    return TokenDataset(paths, seq_len, token_bytes=data.token_bytes, sizes=data.sizes(part))


def pair(rows: torch.Tensor) -> Pair:
    return rows[:, :-1], rows[:, 1:]


def arrive(rows: torch.Tensor, device: torch.device) -> Pair:
    """Copy whole rows, before they become pairs: slices of rows are not contiguous and would be
    copied through pageable memory."""
    return pair(device_copy.to_device(rows, device))


def _open(path: Path, kind: np.dtype[Any], tokens: int | None) -> npt.NDArray[Any]:
    fixes = [f"rm -r {shlex.quote(str(path.parent))}"]
    try:
        size = path.stat().st_size
    except OSError as error:
        what = msg("data.shard.cannot_read", path=path, strerror=error.strerror)
        raise UserError(
            Problem(
                "data.shard_damaged",
                what,
                msg("data.shard.intact"),
                fixes,
            ),
            Exit.RESOURCES,
        ) from None
    expected = size // kind.itemsize * kind.itemsize if tokens is None else tokens * kind.itemsize
    if size != expected:
        what = msg("data.shard.changed", path=path, size=size, expected=expected)
        raise UserError(
            Problem(
                "data.shard_damaged",
                what,
                msg("data.shard.intact"),
                fixes,
            ),
            Exit.RESOURCES,
        )
    return mapped_file.read_only(path, kind)
