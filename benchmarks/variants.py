"""Duet's GPT with its design choices as switches, for benchmarks.ablation. With the defaults it
computes exactly the same as training.tasks.gpt.model.GPT (a test compares them)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tasks.gpt.model import ROPE_BASE, SOFTCAP, norm, offset, rotate, rotations, stream
from training.tasks.gpt.model_dims import HEAD_DIM, ModelDims

VALUE_GATE, SMEAR_GATE = 12, 24  # channels that the gates see


@dataclass(frozen=True)
class Choices:
    head_dim: int = HEAD_DIM
    separate_qkv: bool = True
    key_offset: bool = True
    qk_norm: bool = True
    positions: str = "rotary"  # or learned
    layer_norm: bool = False  # with weights and biases, instead of RMSNorm without
    mlp: str = "swiglu"  # or relu2, gelu (4 × wide: the same number of weights)
    tied: bool = False
    softcap: float = SOFTCAP  # 0: none
    z_loss: float = 0.0  # PaLM, arXiv:2204.02311
    gpt2_init: bool = False  # normal, 0.02, residual branches by 1/√(2·depth)
    input_mixing: bool = (
        False  # each block also gets a learned share of the embedding (modded-nanogpt's x0)
    )
    value_embedding: bool = (
        False  # every other block: values get a learned token vector (arXiv:2410.17897)
    )
    # Ideas of nanochat's model, with its initial values.
    value_gate: bool = False  # value embeddings (the last block has one) scaled per head and token
    smear: bool = False  # a token also gets a gated share of the embedding before it
    backout: bool = False  # the stream in the middle is subtracted from the last one
    scaled_stream: bool = False  # each block scales the stream and adds the embedding
    attention_scale: float = 1.0  # of queries and keys
    inner_scale: float = 1.0  # of the initial weights of the MLP's first layer
    rope_base: float = ROPE_BASE
    fp32_stream: bool = False  # also under bf16 autocast


def heads_of(shape: ModelDims, choices: Choices) -> int:
    return shape.heads if choices.head_dim == HEAD_DIM else shape.width // choices.head_dim


class Block(nn.Module):
    def __init__(self, shape: ModelDims, choices: Choices, number: int) -> None:
        super().__init__()
        self.choices, width = choices, shape.width
        self.heads = heads_of(shape, choices)
        self.qkv = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
            if choices.separate_qkv
            else None
        )
        self.merged = None if choices.separate_qkv else nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        inner = shape.inner if choices.mlp == "swiglu" else 4 * width
        self.gate = nn.Linear(width, inner, bias=False) if choices.mlp == "swiglu" else None
        self.up, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self.norms = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            if choices.layer_norm
            else [norm, norm]
        )
        self.mixing = nn.Parameter(torch.tensor([1.0, 0.1])) if choices.input_mixing else None
        has_values = (
            number % 2 == (shape.depth - 1) % 2
            if choices.value_gate
            else choices.value_embedding and number % 2
        )
        self.values = nn.Embedding(shape.vocab, width) if has_values else None
        self.value_gate = (
            nn.Linear(VALUE_GATE, self.heads, bias=False)
            if has_values and choices.value_gate
            else None
        )
        place = number / max(1, shape.depth - 1)
        self.stream_scale = self.start_share = None
        if choices.scaled_stream:
            self.stream_scale = nn.Parameter(torch.tensor(1.15 - 0.1 * place))
            self.start_share = nn.Parameter(torch.tensor(0.2 - 0.15 * place))

    def forward(self, x: Tensor, start: Tensor, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.mixing is not None:
            x = self.mixing[0] * x + self.mixing[1] * start
        if self.stream_scale is not None:
            x = self.stream_scale * x + self.start_share * start
        batch, length, width = x.shape
        y = self.norms[0](x)
        parts = (
            [part(y) for part in self.qkv]
            if self.qkv is not None
            else self.merged(y).chunk(3, dim=-1)  # type: ignore[misc]
        )
        if self.values is not None:
            extra = self.values(inputs).to(parts[2].dtype)
            if self.value_gate is not None:
                gate = 3 * torch.sigmoid(self.value_gate(y[..., :VALUE_GATE]))
                extra = (extra.view(batch, length, self.heads, -1) * gate[..., None]).flatten(2)
            parts[2] = parts[2] + extra
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        if self.choices.positions == "rotary":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.choices.qk_norm:
            q, k = norm(q), norm(k)
        if self.choices.key_offset:
            k = offset(k, torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2))
        if self.choices.attention_scale != 1.0:
            q, k = q * self.choices.attention_scale, k * self.choices.attention_scale
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self._activate(self.norms[1](x)))

    def _activate(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return F.silu(self.gate(x)) * self.up(x)
        return F.relu(self.up(x)).square() if self.choices.mlp == "relu2" else F.gelu(self.up(x))


class Variant(nn.Module):
    """forward(inputs, targets): mean loss in nats per token, as training.tasks.gpt.model.GPT."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelDims, choices: Choices) -> None:
        super().__init__()
        self.shape, self.choices = shape, choices
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.positions = (
            nn.Embedding(shape.max_seq_len, shape.width) if choices.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(shape, choices, n) for n in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width) if choices.layer_norm else norm
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if choices.tied:
            self.head.weight = self.embedding.weight
        head_dim = shape.width // heads_of(shape, choices)
        cos, sin = rotations(shape.max_seq_len, head_dim, choices.rope_base)
        self.smear_gate = nn.Linear(SMEAR_GATE, 1, bias=False) if choices.smear else None
        self.smear_share = nn.Parameter(torch.zeros(1)) if choices.smear else None
        self.backout = nn.Parameter(torch.full((1,), 0.2)) if choices.backout else None
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self._reset()

    @torch.no_grad()
    def _reset(self) -> None:
        bound = (3 / self.shape.width) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim != 2:
                continue
            branch = name.endswith(("proj.weight", "down.weight"))
            if self.choices.gpt2_init:
                nn.init.normal_(
                    weight, std=0.02 / (2 * self.shape.depth) ** 0.5 if branch else 0.02
                )
            elif branch or name == "head.weight":
                nn.init.zeros_(weight)
            elif name == "embedding.weight":
                nn.init.normal_(weight, std=0.02 if self.choices.tied else 1.0)
            elif name == "positions.weight":
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("_gate.weight"):
                nn.init.uniform_(weight, 0.0, 0.02)
            elif name.endswith(("gate.weight", "up.weight")):
                scaled = bound * self.choices.inner_scale
                nn.init.uniform_(weight, -scaled, scaled)
            else:
                nn.init.uniform_(weight, -bound, bound)

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Parameters that Muon updates."""
        return [
            p
            for name, p in self.blocks.named_parameters()
            if p.ndim == 2 and not name.endswith("values.weight")
        ]

    def named(self, *ends: str) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name.endswith(ends)]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions.weight[: inputs.size(1)]
        x = start = x if self.choices.gpt2_init else norm(x)
        if self.smear_gate is not None and self.smear_share is not None:
            share = self.smear_share * torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_GATE]))
            x = start = torch.cat([x[:, :1], x[:, 1:] + share * x[:, :-1]], dim=1)
        if not self.choices.fp32_stream:
            x, start = stream(x), stream(start)
        middle = x
        for number, block in enumerate(self.blocks):
            x = block(x, start, inputs, self.cos[: inputs.size(1)], self.sin[: inputs.size(1)])
            middle = x if number == self.shape.depth // 2 else middle
        if self.backout is not None:
            x = x - self.backout * middle
        logits = self.head(self.norm(x)).float()
        if self.choices.softcap:
            logits = self.choices.softcap * torch.tanh(logits / self.choices.softcap)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if self.training and self.choices.z_loss:
            loss = loss + self.choices.z_loss * torch.logsumexp(logits, -1).square().mean()
        return loss
