"""Bitwise checksums of parameters, equal on all ranks for equal weights of any type."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .messages import msg

BITS = 48  # exact in a float64
PIECE = 1 << 16  # values multiplied at once, so that the result stays in the cache
# On a GPU, where each operation is a kernel launch, many rows of many tensors are one operation:
ROW = 1 << 10  # values multiplied by the same factors
PASS = 1 << 23  # values copied together, whole rows: 32 MiB and a product of 64 MiB for float32
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _factors(device: torch.device, count: int) -> torch.Tensor:
    """A random odd 64-bit number for each position, equal on every rank."""
    numbers = torch.randint(
        -(1 << 63), (1 << 63) - 1, (count,), generator=torch.Generator().manual_seed(0)
    )
    return (numbers | 1).to(device)


@torch.no_grad()
def of_tensors(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One integer below 2^48 per tensor, from the bits and positions of its values; does not wait
    for a GPU.

    Each value is multiplied by a factor for its position, modulo 2^64; the result is the upper bits
    of the sum. Different weights collide with a probability of about 2^-48, or 2^-32 if only signs
    differ. Integers have the same sum in any order. CPU and GPU give different numbers.
    """
    listed = list(tensors)
    on_cpu = not listed or listed[0].device.type == "cpu"
    totals = torch.stack(_by_pieces(listed)) if on_cpu else _by_passes(listed)
    return (totals >> 64 - BITS) & ((1 << BITS) - 1)


def _by_pieces(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of each tensor, on a CPU."""
    totals, pieces = [], 0
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in _words(tensor).split(PIECE):
            pieces += 1
            total += (piece * _factors(piece.device, PIECE)[: len(piece)]).sum() * (2 * pieces + 1)
        totals.append(total)
    return totals


def _by_passes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sums of all tensors, on a GPU: about eight kernels per pass, with which models of many
    small tensors and of large ones take the same few."""
    device, before = tensors[0].device, 0
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for numbers, pieces in _passes(tensors):
        rows = [-(-len(piece) // ROW) for piece in pieces]
        starts = [0, *itertools.accumulate(rows)]
        words = torch.zeros((starts[-1], ROW), dtype=pieces[0].dtype, device=device)
        flat = words.view(-1)
        places = [
            flat[start * ROW : start * ROW + len(piece)]
            for start, piece in zip(starts, pieces, strict=False)
        ]
        torch._foreach_copy_(places, pieces)
        sums = (words * _factors(device, ROW)).sum(1)
        sums *= torch.arange(2 * before + 1, 2 * (before + starts[-1]) + 1, 2, device=device)
        totals.index_add_(0, _owners(device, tuple(numbers), tuple(rows)), sums)
        before += starts[-1]
    return totals


def _passes(tensors: list[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Pieces of at most PASS values of one type, and the numbers of their tensors. Each piece
    starts a row."""
    numbers, pieces, room = list[int](), list[torch.Tensor](), PASS
    for number in sorted(range(len(tensors)), key=lambda n: tensors[n].element_size()):
        words = _words(tensors[number])
        while len(words):
            if pieces and (not room or pieces[0].dtype != words.dtype):
                yield numbers, pieces
                numbers, pieces, room = [], [], PASS
            numbers.append(number)
            pieces.append(words[:room])
            words = words[room:]
            room -= -(-len(pieces[-1]) // ROW) * ROW
    if pieces:
        yield numbers, pieces


@functools.cache
def _owners(device: torch.device, numbers: tuple[int, ...], rows: tuple[int, ...]) -> torch.Tensor:
    """The tensor's number for each row, copied to a GPU only once: the copy waits for it."""
    return torch.tensor(numbers).repeat_interleave(torch.tensor(rows)).to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the values as integers, (n,)."""
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return plain.contiguous().view(_WORDS[plain.element_size()]).flatten()


def excluded(model: nn.Module) -> Collection[str]:
    """Names of the parameters and buffers that the model excludes from DDP."""
    names: Collection[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return names


def shared(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are equal on all ranks."""
    own = excluded(model)
    return {name: one for name, one in model.named_parameters() if name not in own}


def checksums(model: nn.Module) -> torch.Tensor:
    """One per shared parameter."""
    return of_tensors(shared(model).values())


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
