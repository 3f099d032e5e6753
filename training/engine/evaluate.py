"""Validation in bits per byte: comparable between tokenizers, and between runs of any batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from training import heartbeat
from training.data.loader import pair, to_device

if TYPE_CHECKING:
    from training.engine.session import Session

PHASE = "evaluation"  # of the heartbeat


@dataclass(frozen=True)
class Score:
    loss: float  # nats per token
    bpb: float  # bits per byte


def share(session: Session) -> int:
    """Sequences that each rank evaluates."""
    data, ranks = session.validation, session.world.world_size
    return min(len(data), max(ranks, session.config.eval_tokens // data.seq_len)) // ranks


def why_not(session: Session) -> str:
    """Why a run that wants validation has none, for people; or nothing."""
    data, ranks = session.validation, session.world.world_size
    if not session.config.eval_every or share(session):
        return ""
    found = f"{len(data)} sequence{'' if len(data) == 1 else 's'} of {data.seq_len} tokens"
    wanted = f"one for each of {ranks} ranks" if ranks > 1 else "one"
    return f"no validation: the text for it makes {found}, fewer than {wanted}; more text, or a smaller --max_seq_len"


@torch.no_grad()
def evaluate(session: Session) -> Score | None:
    """The same sequences every time, shared evenly by the ranks; None when there are fewer than one for each.

    At most `eval_tokens`, all ranks. Separators are no bytes and are not predicted. A collective.
    """
    data, world, batch = session.validation, session.world, session.batch.device_sequences
    if (per_rank := share(session)) == 0:
        return None
    lengths = torch.from_numpy(np.asarray(session.tokenizer.byte_lengths(), np.int64)).to(world.device)
    mine = range(world.rank * per_rank, (world.rank + 1) * per_rank)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # nats, tokens, bytes
    session.raw.eval()
    for start in range(0, per_rank, batch):
        heartbeat.current.beat(PHASE)
        inputs, targets = pair(to_device(data.rows(mine[start : start + batch]), world.device))
        told = lengths[targets]
        targets = targets.masked_fill(told == 0, -1)
        with session.autocast:
            nats = session.raw(inputs, targets, reduction="sum")
        sums += torch.stack((nats.double(), (targets != -1).sum().double(), told.sum().double()))
    session.raw.train()
    if world.world_size > 1:
        dist.all_reduce(sums)
    nats_all, tokens, told_bytes = sums.tolist()
    return Score(nats_all / tokens, nats_all / math.log(2) / told_bytes)
