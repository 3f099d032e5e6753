"""Exponential moving average of the weights (`--ema`), with which evaluation, samples and exports
work.

Every rank computes the same average from the same weights: no communication, also when it
evaluates its share. The average stays on the device. It is fp32 even for weights of 16 bits, in
which a change of 0.1 % is rounded away. Buffers, such as the statistics of batch norm, are the
model's own: they are averages already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Bytes of the averages that are updated together: as much as one launch of torch's foreach kernels
# takes. Temporary memory, of weights of 16 bits and of steps that may be skipped, is limited to it.
PASS = 1 << 26


def decay_at(step: int, decay: float) -> float:
    """The decay after optimizer step `step` (0-based): a warm-up, so that the average forgets the
    initial weights in a short run too (TensorFlow's ExponentialMovingAverage with num_updates).
    It depends on the step alone, so a resumed run needs no further state."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """The average of the parameters of `model` that are trained, from their current values on."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names: dict[str, int] = {}  # tied weights have several
        self._shapes: dict[str, torch.Size] = {}  # of frozen ones too
        self._weights: list[nn.Parameter] = []
        places: dict[int, int] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._shapes[name] = weight.shape
            if weight.requires_grad:
                if id(weight) not in places:
                    places[id(weight)] = len(self._weights)
                    self._weights.append(weight)
                self._names[name] = places[id(weight)]
        self._averages = [
            w.detach().to(torch.promote_types(w.dtype, torch.float32), copy=True)
            for w in self._weights
        ]
        self._passes = list(_passes(self._averages, self._weights))

    @torch.no_grad()
    def update(self, step: int, overflow: Tensor | None = None) -> None:
        """After optimizer step `step` (0-based). Changes nothing if `overflow` is 1.0, which the
        host does not read."""
        share = 1 - decay_at(step, self.decay)
        factor = None if overflow is None else (1 - overflow) * share
        for averages, weights in self._passes:
            found = [w.to(a.dtype) for w, a in zip(weights, averages, strict=True)]
            if factor is None:
                torch._foreach_lerp_(averages, found, share)
            else:
                change = torch._foreach_sub(found, averages)
                torch._foreach_mul_(change, factor)
                torch._foreach_add_(averages, change)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights: its parameters point to them, without a copy if the
        types are equal."""
        own = [weight.data for weight in self._weights]
        try:
            for weight, average in zip(self._weights, self._averages, strict=True):
                weight.data = average.to(weight.dtype)
            yield
        finally:
            for weight, data in zip(self._weights, own, strict=True):
                weight.data = data

    def state_dict(self) -> dict[str, Tensor]:
        """By the names of the parameters."""
        return {name: self._averages[place] for name, place in self._names.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What was frozen when it was saved begins with its current values, and what is frozen now
        has no average. Raises ValueError if the state is of another model."""
        if any(self._shapes.get(name) != value.shape for name, value in state.items()):
            raise ValueError("the averaged weights have other names or shapes")
        for name, place in self._names.items():
            if name in state:
                self._averages[place].copy_(state[name])


def _passes(
    averages: list[Tensor], weights: list[nn.Parameter]
) -> Iterator[tuple[list[Tensor], list[nn.Parameter]]]:
    """Averages and weights in parts of at most PASS bytes, or one tensor."""
    start, used = 0, 0
    for place, average in enumerate(averages):
        if used and used + average.nbytes > PASS:
            yield averages[start:place], weights[start:place]
            start, used = place, 0
        used += average.nbytes
    if averages:
        yield averages[start:], weights[start:]
