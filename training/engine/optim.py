"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import torch

from training.config.schema import Config
from training.engine.model import GPT

BETAS = (0.9, 0.95)
EPSILON = 1e-10
REFERENCE_WIDTH = 768  # the learning rates of the configuration are for this width


def build(model: GPT, config: Config) -> torch.optim.Optimizer:
    """AdamW, fused, with a learning rate per kind of weight, scaled by width as nanochat does; `initial_lr` keeps the peak."""
    scale = (model.shape.width / REFERENCE_WIDTH) ** -0.5
    groups = [
        {"params": list(model.blocks.parameters()), "lr": config.matrix_lr * scale, "weight_decay": config.weight_decay},
        {"params": list(model.embedding.parameters()), "lr": config.embedding_lr * scale, "weight_decay": 0.0},
        {"params": list(model.head.parameters()), "lr": config.unembedding_lr * scale, "weight_decay": 0.0},
    ]
    for group in groups:
        group["initial_lr"] = group["lr"]
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=True)


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


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """Apply the multiplier; returns the matrices' learning rate, the one that is recorded."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
