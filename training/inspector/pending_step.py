"""Steps whose loss may still be on its way from the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import checksum, sample_tracker
from .messages import msg
from .reporting import joined, listed


@dataclass
class PendingStep:
    """A step whose loss may still be on its way from the GPU: tensors are in host memory once
    `events` are complete."""

    step: int
    size: int | None
    loss: torch.Tensor | float | None
    events: list[Any]
    place: tuple[int, int, list[int]] | None  # epoch, batch, indices
    batch: Any
    losses: torch.Tensor | None
    sums: torch.Tensor | None  # checksums of the parameters, if due

    @classmethod
    def taken(
        cls,
        step: int,
        size: int | None,
        loss: Any,
        place: tuple[int, int, list[int]] | None,
        batch: Any,
        parameters: Iterable[torch.Tensor] | None,
    ) -> PendingStep:
        """loss: a tensor (mean of this rank, or one value per sample), a number, or None;
        parameters: their checksums are taken; None: they are not due."""
        own: torch.Tensor | float | None = None
        losses, sums, gpus = None, None, set[torch.device]()
        if isinstance(loss, torch.Tensor):
            losses = loss.detach() if loss.dim() else None
            mean = loss if losses is None else losses.float().mean()
            own = _on_its_way(mean.detach(), gpus) if mean.is_cuda else mean.item()
        elif loss is not None:
            own = float(loss)
        if parameters is not None:
            sums = _on_its_way(checksum.of_tensors(parameters), gpus)
        # Behind the copies, on their GPU, which may not be the current one.
        events = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]
        return cls(step, size, own, events, place, batch, losses, sums)

    def has_arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def value(self) -> float | None:
        """The loss; waits for it."""
        for event in self.events:
            event.synchronize()
        return None if self.loss is None else float(self.loss)

    def samples(self) -> str:
        """The samples of a loss that is not finite; '' if unknown."""
        parts = []
        indices = self.place[2] if self.place else []
        if self.place:
            parts.append(
                msg("inspector.not_finite.place", epoch=self.place[0], batch=self.place[1])
            )
        if self.size and (self.batch is not None or self.losses is not None):
            inputs, own = sample_tracker.not_finite(self.batch, self.losses, self.size)
            if inputs:
                parts.append(msg("inspector.not_finite.input", samples=_named(inputs, indices)))
            if own:
                parts.append(msg("inspector.not_finite.own_loss", samples=_named(own, indices)))
            if not inputs and not own:
                parts.append(msg("inspector.not_finite.inputs_finite"))
        if indices:
            samples = _samples(indices, 2 * sample_tracker.SHOWN)
            parts.append(msg("inspector.not_finite.batch", samples=samples))
        return joined(parts)


def _on_its_way(tensor: torch.Tensor, gpus: set[torch.device]) -> torch.Tensor:
    """Copy to host memory without waiting for the GPU, which joins `gpus`."""
    if not tensor.is_cuda:
        return tensor
    gpus.add(tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def _samples(indices: list[int], limit: int) -> str:
    samples = listed(indices, limit)
    return (
        msg("inspector.not_finite.sample", samples=samples)
        if len(indices) == 1
        else msg("inspector.not_finite.samples", samples=samples)
    )


def _named(places: list[int], indices: list[int]) -> str:
    if indices and places[-1] < len(indices):
        return _samples([indices[p] for p in places], sample_tracker.SHOWN)
    shown = listed(places, sample_tracker.SHOWN)
    return (
        msg("inspector.not_finite.sample_place", places=shown)
        if len(places) == 1
        else msg("inspector.not_finite.sample_places", places=shown)
    )
