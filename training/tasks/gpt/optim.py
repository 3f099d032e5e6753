"""A GPT's optimizers: Muon for the blocks' matrices, AdamW for everything else.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) replaces the update of a matrix by the nearest
orthogonal matrix; its effect is measured in docs/model.md. Its arithmetic is up to a fifth of a
small step, so the ranks share it: each updates some matrices and sends them to the others (ZeRO
stage 1, arXiv:1910.02054). The weights are bit-identical.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from training.config.schema import Config
from training.host import decisions
from training.tasks.gpt.model import GPT
from training.tasks.gpt.muon import Fp32Muon
from training.tasks.optim import MOMENTUM, Group, Optimizers

BETAS = (0.8, 0.95)
EPSILON = 1e-10
REFERENCE_WIDTH = 768  # the configured AdamW learning rates apply to this width
# Learning rate of the blocks if the configuration has auto.
MATRIX_LR = {"muon": 0.02, "adamw": 0.0015}


def build(model: GPT, config: Config) -> Optimizers:
    """Optimizers of a model, fused if torch supports it; the ranks of the process group, if any,
    share Muon's work."""
    scale = (model.shape.width / REFERENCE_WIDTH) ** -0.5
    rate = MATRIX_LR[config.optimizer] if isinstance(config.matrix_lr, str) else config.matrix_lr
    matrices = list(model.blocks.parameters())
    groups: list[Group] = [
        {
            "params": list(model.embedding.parameters()),
            "lr": config.embedding_lr * scale,
            "weight_decay": 0.0,
        },
        {
            "params": list(model.head.parameters()),
            "lr": config.unembedding_lr * scale,
            "weight_decay": 0.0,
        },
    ]
    first: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        emulated = matrices[0].device.type == "cpu" and not decisions.cpu_bf16()
        muon = Fp32Muon if emulated else torch.optim.Muon
        settings = {"lr": rate, "weight_decay": config.weight_decay, "momentum": MOMENTUM[1]}
        if dist.is_initialized():
            # saves a single process 0.1 s
            from torch.distributed.optim import (
                ZeroRedundancyOptimizer,
            )

            # As views of one buffer per rank, the matrices are sent in one message.
            first.append(
                ZeroRedundancyOptimizer(matrices, muon, parameters_as_bucket_view=True, **settings)
            )
        else:
            first.append(muon(matrices, **settings))
    else:
        groups.insert(
            0, {"params": matrices, "lr": rate * scale, "weight_decay": config.weight_decay}
        )
    return Optimizers([*first, torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=True)])
