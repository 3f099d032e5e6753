"""Muon's arithmetic before and after the iteration, and the numbers of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from training.tasks.gpt.newton_schulz import norms
from training.tasks.optim import Group


class Numbers:
    """What all matrices of a step share. `found`, on the device, is 1.0 in a step that changes
    nothing: then each number is a launch, so it is computed once, and only if it is used."""

    def __init__(self, group: Group, found: Tensor | None) -> None:
        self._group = group
        self.skip = None if found is None else found > 0
        self._taken = None if found is None else found == 0
        self.decay: float = group["lr"] * group["weight_decay"]
        self._factors: dict[float, float | Tensor] = {}

    @cached_property
    def weight(self) -> float | Tensor:
        """The share of the gradients in the momentum."""
        return self._if_taken(1 - self._group["momentum"])

    @cached_property
    def momentum(self) -> float | Tensor:
        return 1 - self.weight

    @cached_property
    def keep(self) -> float | Tensor:
        """Factor of the weights: what the decay leaves."""
        return 1 - self._if_taken(self.decay)

    def factor(self, scale: float) -> float | Tensor:
        """Factor of the updates of matrices with this `scale` of the learning rate."""
        if scale not in self._factors:
            self._factors[scale] = self._if_taken(-self._group["lr"] * scale)
        return self._factors[scale]

    def _if_taken(self, number: float) -> float | Tensor:
        return number if self._taken is None else self._taken * number


def nesterov(
    gradients: Tensor, buffer: Tensor, numbers: Numbers, out: Tensor | None = None
) -> Tensor:
    """Update the momentum in `buffer`. Returns Nesterov's update, in `out` if there is one."""
    buffer.lerp_(gradients, numbers.weight)
    return torch.lerp(gradients, buffer, numbers.momentum, out=out)


def compiled_update(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """nesterov() and Muon._scaled() without temporary memory in fp32, and rounded once. A function
    with a code object of its own: torch counts compilations by code object, and partial() has one
    for all."""

    def update(gradients: Tensor, buffer: Tensor, weight: Tensor) -> Tensor:
        moved = buffer.lerp(gradients, weight)
        update = gradients.lerp(moved, 1 - weight)
        buffer.copy_(moved)
        return (update / norms(update)).to(dtype)

    return update


def apply_in_one_kernel(weights: Tensor, updates: Tensor, keep: Tensor, factor: Tensor) -> None:
    """Weight decay and update, which is read once. As a product of its own, an update of 16 bits
    times `factor` would be rounded."""
    weights.mul_(keep).addcmul_(updates, factor)


def argument(number: float | Tensor) -> Tensor:
    """A number that varies, for a compiled function: as a tensor on the CPU it is an argument of
    the kernel. As a float it would be compiled in."""
    return number if isinstance(number, Tensor) else torch.tensor(number)
