"""Muon with ideas of nanochat's optimizer as switches, for benchmarks.ablation. Without any it
computes the same as torch.optim.Muon, which iterates in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.tasks.gpt.newton_schulz import COEFFICIENTS, STEPS

# arXiv:2505.16932, for five iterations, a safety factor of 2e-2 and a cushion of 2
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
BETA2 = 0.9


@dataclass(frozen=True)
class Ideas:
    polar_express: int = 0  # iterations; 0: five of Newton and Schulz
    equal_rows: bool = False  # MuonEq, arXiv:2603.28254
    exact_norm: bool = False  # Muon+, arXiv:2602.21545
    variance_reduction: bool = False  # NorMuon, arXiv:2510.05491
    cautious_decay: bool = False  # only of weights that the update shrinks

    @property
    def any(self) -> bool:
        return self != Ideas()


class Muon(torch.optim.Optimizer):
    """`dtype`: of the iteration."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        ideas: Ideas,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.ideas, self.dtype = ideas, dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                self._one(matrix, group)

    def _one(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        assert matrix.grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
        update = self._orthogonal(matrix.grad.lerp(state["momentum"], group["momentum"]))
        if self.ideas.variance_reduction:
            update = _evened(update, state)
        rate = group["lr"] * math.sqrt(max(1.0, matrix.size(0) / matrix.size(1)))
        decay = group["lr"] * group["weight_decay"] * matrix
        if self.ideas.cautious_decay:
            decay = decay * (update * matrix >= 0)
        matrix.sub_(rate * update + decay)

    def _orthogonal(self, update: Tensor) -> Tensor:
        if self.ideas.equal_rows:
            rows = update.norm(dim=-1, keepdim=True).clamp_min(1e-6)
            update = update * (update.norm() / update.size(0) ** 0.5 / rows)
        tall = update.size(0) > update.size(1)
        out = (update.mT if tall else update).to(self.dtype)
        out = out / (out.norm() * (1.01 if self.ideas.polar_express else 1.0) + 1e-7)
        for a, b, c in POLAR_EXPRESS[: self.ideas.polar_express] or (COEFFICIENTS,) * STEPS:
            gram = out @ out.mT
            gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            out = torch.addmm(out, gram, out, beta=a)
        out = out.to(update.dtype)
        if self.ideas.exact_norm:
            out = out * (out.size(0) ** 0.5 / out.norm().clamp_min(1e-6))
        return out.mT if tall else out


def _evened(update: Tensor, state: dict[str, Any]) -> Tensor:
    """Rows (of a wide matrix: columns) with large updates take smaller ones; the norm of all is
    the same."""
    side = -1 if update.size(0) >= update.size(1) else -2
    mean = update.square().mean(dim=side, keepdim=True)
    second = state.setdefault("second", torch.zeros_like(mean))
    second.lerp_(mean, 1 - BETA2)
    evened = update * second.clamp_min(1e-10).rsqrt()
    return evened * (update.norm() / evened.norm().clamp_min(1e-10))
