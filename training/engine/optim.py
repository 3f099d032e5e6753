"""Optimizer and learning-rate schedule: Muon for the blocks' matrices, AdamW for everything else.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) replaces the update of a matrix by the nearest orthogonal one. What it is
worth here stands in docs/model.md. Its arithmetic costs as much as a fifth of a small step, so ranks share it: each updates
some of the matrices and sends them to the others (ZeRO stage 1, arXiv:1910.02054). The weights are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from training.config.schema import Config
from training.engine.model import GPT

BETAS = (0.8, 0.95)
EPSILON = 1e-10
REFERENCE_WIDTH = 768  # AdamW's learning rates of the configuration are for this width
# The blocks' learning rate where the configuration says auto.
MATRIX_LR = {"muon": 0.02, "adamw": 0.0015}
MOMENTUM = (0.85, 0.95)  # Muon's, at the first step and from step MOMENTUM_STEPS on
MOMENTUM_STEPS = 300

Group = dict[str, Any]


class Optimizers:
    """Several optimizers as one. Learning rates and momentum are a function of the step alone: nothing to save of them."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[Group]:
        return [group for part in self.parts for group in part.param_groups]

    def schedule(self, step: int, share: float) -> float:
        """Set what step `step` (0-based) uses, `share` of the peak learning rates; returns the matrices' rate, the one that is
        recorded."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * share
            if "momentum" in group:
                done = min(1.0, step / MOMENTUM_STEPS)
                group["momentum"] = MOMENTUM[0] + (MOMENTUM[1] - MOMENTUM[0]) * done
        return float(self.param_groups[0]["lr"])

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def gather(self) -> None:
        """Bring what the ranks hold of the state to rank 0, for state_dict(). A collective."""
        for part in self.parts:
            if hasattr(part, "consolidate_state_dict"):
                part.consolidate_state_dict()

    def state_dict(self) -> list[dict[str, Any]]:
        """Moments of all parameters, the same for every number of ranks. On rank 0, after gather()."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Moments only: rates and decay are the configuration's, which a resumed run may have changed."""
        for part, state in zip(self.parts, states, strict=True):
            settings = [{name: value for name, value in group.items() if name != "params"} for group in part.param_groups]
            part.load_state_dict(state)
            for group, own in zip(part.param_groups, settings, strict=True):
                group.update(own)


def build(model: GPT, config: Config) -> Optimizers:
    """The optimizers of a model, fused where torch can; Muon's work is shared by the ranks of the process group, if any."""
    scale = (model.shape.width / REFERENCE_WIDTH) ** -0.5
    rate = MATRIX_LR[config.optimizer] if isinstance(config.matrix_lr, str) else config.matrix_lr
    matrices = list(model.blocks.parameters())
    groups: list[Group] = [
        {"params": list(model.embedding.parameters()), "lr": config.embedding_lr * scale, "weight_decay": 0.0},
        {"params": list(model.head.parameters()), "lr": config.unembedding_lr * scale, "weight_decay": 0.0},
    ]
    first: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        settings = {"lr": rate, "weight_decay": config.weight_decay, "momentum": MOMENTUM[1]}
        if dist.is_initialized():
            from torch.distributed.optim import ZeroRedundancyOptimizer  # 0.1 s that a single process need not wait

            # As views of one buffer for each rank, the matrices travel in one message.
            first.append(ZeroRedundancyOptimizer(matrices, torch.optim.Muon, parameters_as_bucket_view=True, **settings))
        else:
            first.append(torch.optim.Muon(matrices, **settings))
    else:
        groups.insert(0, {"params": matrices, "lr": rate * scale, "weight_decay": config.weight_decay})
    return Optimizers([*first, torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=True)])


def multiplier(step: int, total: int, config: Config) -> float:
    """Share of the peak learning rate at this step (0-based): linear warm-up, constant, linear decay."""
    warmup, warmdown = round(config.warmup_ratio * total), round(config.warmdown_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    left = total - step
    if left > warmdown:
        return 1.0
    share = left / (warmdown + 1)
    return share + (1 - share) * config.final_lr_frac
