"""A plain GPT-2 with a plain AdamW loop: the baseline of benchmarks.target.

python -m benchmarks.contenders.gpt2 RUN        RUN: the fields of Run in JSON

Model as GPT-2 (LayerNorm, GELU, learned positions, tied embedding, biases, initial weights of 0.02,
heads of 64), recipe as GPT-3: AdamW with betas 0.9 and 0.95, decay 0.1 of the matrices, 5 %
warm-up, cosine to 10 %, clipping at 1.0.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders.loop import IGNORED, Contender, Run, train

HEAD_DIM = 64
STD = 0.02
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WARMUP, FINAL = 0.05, 0.1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            p.view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for p in self.qkv(self.norm1(x)).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, depth: int, width: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                # the residual sum grows with the depth
                branch = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weights, std=STD / math.sqrt(2 * depth) if branch else STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weights)

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        x = self.embedding(inputs) + self.positions.weight[: inputs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
        )


def share(step: int, steps: int) -> float:
    """Share of the peak rate at this step (0-based)."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))


def optimizer(model: GPT2, rate: float) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def make(run: Run) -> Contender:
    model = GPT2(run.depth, 64 * run.depth, run.vocab, run.seq_len).to(run.device)
    adamw = optimizer(model, run.rate)

    def loss(inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        with torch.autocast(run.device, torch.bfloat16, enabled=run.bf16):
            return model(inputs, targets, reduction)  # type: ignore[no-any-return]

    def update(step: int) -> None:
        for group in adamw.param_groups:
            group["lr"] = run.rate * share(step, run.steps)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()

    return Contender(model, loss, update, [adamw])


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])), make)
