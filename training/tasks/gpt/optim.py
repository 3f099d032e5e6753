"""A GPT's optimizers: Muon for the blocks' matrices, AdamW for everything else. Muon's effect is
measured in docs/model.md."""

from __future__ import annotations

import torch
import torch.distributed as dist

from training.config.schema import Config
from training.host import decisions
from training.tasks.gpt.model import GPT
from training.tasks.gpt.muon import Muon
from training.tasks.gpt.rates import MATRIX_LR
from training.tasks.optim import MOMENTUM, Group, Optimizers

BETAS = (0.8, 0.95)
EPSILON = 1e-10
REFERENCE_WIDTH = 768  # the configured AdamW learning rates apply to this width

# In this order: what multiplies in one of them multiplies in those before.
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
        first.append(
            Muon(
                matrices,
                lr=rate,
                weight_decay=config.weight_decay,
                momentum=MOMENTUM[1],
                dtype=_products(matrices[0].device),
            )
        )
    else:
        groups.insert(
            0, {"params": matrices, "lr": rate * scale, "weight_decay": config.weight_decay}
        )
    return Optimizers([*first, torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=True)])


def _products(device: torch.device) -> torch.dtype:
    """The type in which Muon multiplies: 16 bits where the device has matrix units for them; a CPU
    emulates others ten times as slowly as fp32. On a GPU fp16, which has the peak rate of bf16 and
    rounds eight times as finely. All ranks have the same, since they exchange updates as bytes;
    with a process group a collective."""
    if device.type == "cpu":
        own = "bf16" if decisions.cpu_bf16() else "fp32"
    else:
        capability = torch.cuda.get_device_capability(device)
        best = decisions.best_type(capability, torch.cuda.get_device_name(device))
        own = "fp32" if best == "fp32" else "fp16"
    number = list(TYPES).index(own)
    if dist.is_available() and dist.is_initialized():
        least = torch.tensor(number, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        number = int(least)
    return list(TYPES.values())[number]
