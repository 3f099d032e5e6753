"""GPT: pre-norm transformer with rotary positions, RMSNorm without weights, QK-norm, squared ReLU and an untied head.

The family is that of nanochat and modded-nanogpt: model_dim = depth × 64, heads of 128 where the width allows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH_PER_LAYER = 64
HEAD_DIM = 128
ROPE_BASE = 10000.0
SOFTCAP = 15.0  # logits stay in ±15 (Gemma 2, arXiv:2408.00118): early steps can not blow up


@dataclass(frozen=True)
class Shape:
    """What the model is made of; stands in every checkpoint."""

    depth: int
    vocab: int  # rows of the embedding
    max_seq_len: int

    @property
    def width(self) -> int:
        return self.depth * WIDTH_PER_LAYER

    @property
    def heads(self) -> int:
        return max(1, self.width // HEAD_DIM)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of x (batch, heads, T, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = norm(rotate(q, cos, sin)).to(v.dtype), norm(rotate(k, cos, sin)).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    """forward(inputs) gives logits; forward(inputs, targets) the mean loss in nats per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial weights: residual branches and head start at zero, so the first loss is exactly ln(vocab)."""
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.zeros_(self.head.weight)
        bound = (3 / self.shape.width) ** 0.5
        for block in self.blocks:
            assert isinstance(block, Block)
            for matrix in (block.attention.qkv, block.up):
                nn.init.uniform_(matrix.weight, -bound, bound)
            for matrix in (block.attention.proj, block.down):
                nn.init.zeros_(matrix.weight)
        head_dim = self.shape.width // self.shape.heads
        frequency = ROPE_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(self.shape.max_seq_len), frequency)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, inputs: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """inputs, targets: (batch, T) int64, T ≤ max_seq_len; a target of −1 is not counted."""
        length = inputs.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = norm(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(norm(x)).float()
        logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, temperature: float, generator: torch.Generator) -> list[int]:
        """`count` tokens after the prompt, sampled one by one."""
        device = self.head.weight.device
        tokens = torch.tensor([prompt], device=device)
        for _ in range(count):
            logits = self(tokens[:, -self.shape.max_seq_len :])[:, -1]
            chances = torch.softmax(logits.cpu() / temperature, dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=generator).to(device)), dim=1)
        return tokens[0, len(prompt) :].tolist()
