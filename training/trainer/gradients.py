"""The gradients of a step: their values, their norm, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from training.inspector.checksum import shared


class _Held(NamedTuple):
    """What torch reads of a parameter."""

    grad: torch.Tensor


def values(weights: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, to be changed in place; of a sparse one (nn.Embedding(sparse=True)), which has
    no norm, the values of its rows, each once."""
    found = []
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
            found.append(weight.grad.values())
        elif weight.grad is not None:
            found.append(weight.grad)
    return found


def parts(
    model: torch.nn.Module, weights: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """The weights that are clipped together: those that all ranks share, and those that the model
    excludes from DDP, whose gradients are other ones on each rank."""
    of_all = {id(weight) for weight in shared(model).values()}
    found = [[w for w in weights if (id(w) in of_all) == common] for common in (True, False)]
    return [part for part in found if part]


def clip(weights: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Clip the gradients together; `limit`: 0 for none. Returns their norm before."""
    found = values(weights)
    norm = torch.nn.utils.get_total_norm(found)
    if limit:
        held: Any = [_Held(one) for one in found]
        torch.nn.utils.clip_grads_with_norm_(held, limit, norm)
    return norm
