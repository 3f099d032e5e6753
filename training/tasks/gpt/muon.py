"""Muon for CPUs without bf16 matrix instructions, on which torch's Muon emulates them and takes ten
times as long."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training.tasks.optim import Group


class Fp32Muon(torch.optim.Muon):
    """The algorithm and state of `torch.optim.Muon` (torch/optim/_muon.py) with the Newton-Schulz
    iteration in fp32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        moving: Tensor = state["momentum_buffer"]
        moving.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(moving, group["momentum"]) if group["nesterov"] else moving
        update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = group["lr"] * math.sqrt(max(1.0, parameter.shape[0] / parameter.shape[1]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-rate)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Approximate nearest orthogonal matrix, by a quintic Newton-Schulz iteration
    (kellerjordan.github.io/posts/muon)."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    out = matrix.T if tall else matrix
    out = out / out.norm().clamp(min=eps)
    for _ in range(steps):
        gram = out @ out.T
        out = torch.addmm(out, torch.addmm(gram, gram, gram, beta=b, alpha=c), out, beta=a)
    return out.T if tall else out
