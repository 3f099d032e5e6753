"""Bitwise checksums of parameters, equal on all ranks for equal weights of any type."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .messages import msg

BITS = 48  # exact in a float64
PIECE = 1 << 16  # values multiplied at once, so that the result stays in the cache
ON_GPU = 4  # factor on a GPU, where every piece is a kernel launch
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _piece(device: torch.device) -> int:
    return PIECE if device.type == "cpu" else PIECE * ON_GPU


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """A random odd 64-bit number for each position in a piece, equal on every rank."""
    numbers = torch.randint(
        -(1 << 63), (1 << 63) - 1, (_piece(device),), generator=torch.Generator().manual_seed(0)
    )
    return (numbers | 1).to(device)


@torch.no_grad()
def of_tensors(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One integer below 2^48 per tensor, from the bits and positions of its values; does not wait
    for a GPU.

    Each value is multiplied by a factor for its position, modulo 2^64; the result is the upper bits
    of the sum. Different weights collide with a probability of about 2^-48, or 2^-32 if only signs
    differ.
    """
    numbers, pieces = [], 0
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in _words(tensor).split(_piece(tensor.device)):
            pieces += 1
            total += (piece * _factors(piece.device)[: len(piece)]).sum() * (2 * pieces + 1)
        numbers.append((total >> 64 - BITS) & ((1 << BITS) - 1))
    return torch.stack(numbers)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the values as integers, (n,)."""
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return plain.contiguous().view(_WORDS[plain.element_size()]).flatten()


def checksums(model: nn.Module) -> torch.Tensor:
    return of_tensors(model.parameters())


def checksum(model: nn.Module) -> torch.Tensor:
    return (checksums(model).sum() % (1 << BITS)).double()


def comparable(model: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """(parameters that must be equal on all ranks, reasons for omitted ones or ''). Sharded
    parameters always differ."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return [], msg("inspector.checksum.fsdp")
    ignored = (
        set(getattr(model, "parameters_to_ignore", ()))
        if hasattr(model, "require_backward_grad_sync")
        else set()
    )
    inner = (
        getattr(model, "module", model) if hasattr(model, "require_backward_grad_sync") else model
    )
    kept, sharded, lazy = [], 0, 0
    for name, parameter in inner.named_parameters():
        if name in ignored:
            continue
        if _is_sharded(parameter):
            sharded += 1
        elif torch.nn.parameter.is_lazy(parameter):
            lazy += 1
        else:
            kept.append((name, parameter))
    why = [msg("inspector.checksum.sharded", sharded=sharded)] if sharded else []
    why += [msg("inspector.checksum.lazy", lazy=lazy)] if lazy else []
    why += [msg("inspector.checksum.ignored", ignored=len(ignored))] if ignored else []
    return kept, ", ".join(why)


def _is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor (FSDP2, tensor parallel), of DeepSpeed ZeRO-3, or without
    storage."""
    return (
        hasattr(parameter, "placements")
        or hasattr(parameter, "ds_id")
        or parameter.device.type == "meta"
    )
