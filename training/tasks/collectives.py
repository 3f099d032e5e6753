"""Exchanges of tensors between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather(
    every: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None
) -> dist.Work:
    """`mine` of all ranks in `every`, in their order; complete when the work is. As bytes: gloo has
    no bf16 in some versions of torch."""
    # torch 2.13 has a new name for it, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    received, sent = every.view(torch.uint8).flatten(), mine.view(torch.uint8).flatten()
    work: dist.Work = gather(received, sent, group=group, async_op=True)
    return work
