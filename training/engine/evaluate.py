"""Validation in bits per byte: comparable between tokenizers, and between runs of any batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.data.loader import TokenDataset
from training.data.tokenizer import BOS
from training.distributed import World


@dataclass(frozen=True)
class Score:
    loss: float  # nats per token
    bpb: float  # bits per byte


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: TokenDataset, world: World, batch: int, tokens: int, autocast: torch.autocast) -> Score | None:
    """The same sequences every time, shared evenly by the ranks; None when there are fewer than one for each.

    `tokens`: at most so many, all ranks. Separators are no bytes and are not predicted. A collective.
    """
    per_rank = min(len(data), max(world.world_size, tokens // data.seq_len)) // world.world_size
    if per_rank == 0:
        return None
    mine = range(world.rank * per_rank, (world.rank + 1) * per_rank)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # nats, bytes
    for start in range(0, per_rank, batch):
        inputs, targets = data.batch(list(mine[start : start + batch]))
        targets = targets.masked_fill(targets == BOS, -1)
        with autocast:
            nats = model(inputs.to(world.device), targets.to(world.device), reduction="sum")
        sums += torch.stack((nats.double(), (targets != -1).sum().to(world.device).double()))
    if world.world_size > 1:
        dist.all_reduce(sums)
    loss = float(sums[0] / sums[1])
    return Score(loss, loss / math.log(2))
