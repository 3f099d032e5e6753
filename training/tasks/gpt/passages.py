"""The passages of an evaluated text with the highest and the lowest loss."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from training.core.messages import msg
from training.data.tokenizer_base import Tokenizer
from training.tasks.evaluation import Part

SHOWN = 4  # passages of each kind
LEAST = 64  # bytes: the loss of a shorter passage is mostly chance
LENGTH = 400  # characters of an excerpt

# bits per byte, order of the passage, its tokens, its place in the text in bytes
Found = tuple[float, int, npt.NDArray[np.int64], int]


class Passages:
    """A passage is the part of one document in one window of the context."""

    def __init__(self, words: Tokenizer) -> None:
        self.words = words
        self.highest: list[Found] = []  # heaps; the lowest ones with negative bits per byte
        self.lowest: list[Found] = []
        self.count = self.bytes = 0

    def add(self, rows: torch.Tensor, found: Mapping[str, torch.Tensor]) -> None:
        """Windows, (rows, T + 1), and nats and bytes of their targets (rows, T)."""
        tokens = rows.cpu().numpy()
        nats, sizes = (found[name].double().cpu().numpy() for name in ("nats", "bytes"))
        for row, each_nats, each_size in zip(tokens, nats, sizes, strict=True):
            separators = np.flatnonzero(row[1:] == self.words.bos)
            for start, stop in zip(
                [0, *separators + 1], [*separators, len(each_size)], strict=True
            ):
                size = int(each_size[start:stop].sum())
                if size >= LEAST:
                    bits = float(each_nats[start:stop].sum()) / math.log(2) / size
                    self._keep(bits, row[1 + start : 1 + stop])
                self.bytes += size

    def _keep(self, bits: float, tokens: npt.NDArray[np.int64]) -> None:
        if not math.isfinite(bits):
            return
        self.count += 1
        for heap, value in ((self.highest, bits), (self.lowest, -bits)):
            if len(heap) < SHOWN or value > heap[0][0]:
                one = (value, -self.count, tokens.copy(), self.bytes)
                (heapq.heappush if len(heap) < SHOWN else heapq.heapreplace)(heap, one)

    def parts(self) -> list[Part]:
        """From the highest loss to the lowest, without a passage twice."""
        found = {order: (value, tokens, at) for value, order, tokens, at in self.highest}
        found |= {order: (-value, tokens, at) for value, order, tokens, at in self.lowest}
        return [
            Part(
                msg("tasks.gpt.passage", at=at),
                {"bpb": bits},
                _excerpt(self.words.decode(tokens.tolist())),
            )
            for bits, tokens, at in sorted(found.values(), key=lambda one: -one[0])
        ]


def _excerpt(text: str) -> str:
    """Without the parts of a character at its ends, unless there is nothing else."""
    return (text.strip("\ufffd") or text)[:LENGTH]
