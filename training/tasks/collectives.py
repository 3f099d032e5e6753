"""Exchanges of tensors between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


def all_gather(every: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """`mine` of all ranks in `every`, in their order; complete when the work is. As bytes: gloo has
    no bf16 in some versions of torch."""
    # torch 2.13 has a new name for it, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    received, sent = every.view(torch.uint8).flatten(), mine.view(torch.uint8).flatten()
    work: dist.Work = gather(received, sent, group=group, async_op=True)
    return work


def gather_trees(mine: Any, device: torch.device, group: dist.ProcessGroup) -> list[Any]:
    """`mine` of each rank, containers of tensors, in the order of the ranks: on rank 0, its own as
    it is and those of others on the CPU; [] elsewhere. They pass through `device`, one tensor at a
    time."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    outlines: list[Any] = [None] * len(ranks)
    dist.all_gather_object(outlines, tree_map_only(Tensor, _outline, mine), group=group)
    found = []
    for source, outline in zip(ranks, outlines, strict=True):
        tree = mine if source == rank else outline
        if source != 0:
            leaves, form = tree_flatten(tree)
            sent = (_sent(one, source, device, group) for one in leaves)
            tree = tree_unflatten(sent, form)
        found.append(tree)
    return found if rank == 0 else []


def _outline(one: Tensor) -> Tensor:
    """What pickle sends of a tensor: without its numbers, if those are in one piece."""
    return one.detach().to("meta") if _in_one_piece(one) else one.detach().cpu()


def _in_one_piece(one: Any) -> bool:
    plain = isinstance(one, Tensor) and not is_traceable_wrapper_subclass(one)
    return plain and one.layout == torch.strided


def _sent(one: Any, source: int, device: torch.device, group: dist.ProcessGroup) -> Any:
    """A leaf of the tree of rank `source`, which the others have as an outline; on rank 0 with its
    numbers."""
    if not _in_one_piece(one):
        return one
    if dist.get_rank() == source:
        data = one.detach().to(device).contiguous().flatten().view(torch.uint8)
    else:
        data = torch.empty(one.nbytes, dtype=torch.uint8, device=device)
    # not send(), for which NCCL opens a communicator for each pair of ranks
    dist.broadcast(data, source, group=group)
    if dist.get_rank() != 0:
        return None
    return torch.empty_like(one, device="cpu").copy_(data.view(one.dtype).view(one.shape))
