"""Shared by all contenders: model, optimizer, batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims

CLIP = 1.0
LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Job:
    depth: int
    seq_len: int
    batch: int  # sequences
    precision: str  # fp32, or bf16: autocast
    steps: int
    vocab: int
    shard: str  # little-endian 16-bit tokens

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"


@dataclass
class Trace:
    stamps: list[float] = field(default_factory=list)  # seconds, at the end of each step
    loss: float = 0.0  # of the last step


def model(job: Job) -> GPT:
    return GPT(ModelDims(job.depth, job.vocab, job.seq_len))


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


class Steps(Dataset[Pair]):
    """Item n is the whole batch of step n, gathered from the memory-mapped shard in one copy."""

    def __init__(self, job: Job) -> None:
        tokens = np.asarray(np.memmap(job.shard, "<u2", "r"))
        self.rows = np.lib.stride_tricks.sliding_window_view(tokens, job.seq_len + 1)[
            :: job.seq_len
        ]
        self.order = np.random.default_rng(0).permutation(len(self.rows))
        self.batch, self.steps = job.batch, job.steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Pair:
        if step >= self.steps:
            raise IndexError(step)
        start = step * self.batch % (len(self.rows) - self.batch)
        rows = torch.from_numpy(self.rows[self.order[start : start + self.batch]].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def loader(job: Job) -> DataLoader[Pair]:
    """DataLoader for the libraries that require one: no workers, ready batches, so that it adds
    almost nothing."""
    return DataLoader(Steps(job), batch_size=None, shuffle=False)
