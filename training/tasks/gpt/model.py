"""GPT: pre-norm transformer with rotary positions, RMSNorm without weights, QK-norm, SwiGLU and an
untied head.

The architecture follows nanochat and modded-nanogpt: model_dim = depth × 64, heads of 128 if the
depth is even. The effect of each choice: docs/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.recompute import keeping_products

ROPE_BASE = 10000.0
SOFTCAP = 15.0  # logits stay in ±15 (Gemma 2, arXiv:2408.00118): early steps cannot blow up


@dataclass(frozen=True)
class MemorySavings:
    """Settings that save memory at the cost of time; the arithmetic is the same."""

    blocks: int = 0  # blocks that keep only their input, recomputed in the backward pass
    chunks: int = 1  # parts of logits and loss, each recomputed in the backward pass
    selective: int = 0  # further blocks that keep only their products and attention


def norm(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.size(-1),))
    # On a GPU autocast would copy it into fp32 first; the sums inside are fp32 anyway.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, (x.size(-1),))


def rotations(length: int, head_dim: int, base: float = ROPE_BASE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotate(), (length, head_dim) each: those of the first half twice, the
    sines of the second half negative."""
    frequency = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequency)
    return angles.cos().repeat(1, 2), torch.cat((angles.sin(), -angles.sin()), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of x (…, head_dim), with rows of rotations()
    that broadcast to it. Two halves that are rotated apart and joined make compiled kernels
    slower."""
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


def offset(keys: Tensor, before: Tensor) -> Tensor:
    """Rotated `keys` (…, head_dim), in which the half of the pairs that turns slowest is that of
    `before`, the keys of the token before each. A query then finds what followed a token in one
    layer; otherwise two layers must learn that together, which may take hundreds of steps
    (modded-nanogpt; docs/model.md)."""
    return torch.where(slow_pairs(keys.size(-1), keys.device), before, keys)


def slow_pairs(head_dim: int, device: torch.device) -> Tensor:
    """Whether an element of a head belongs to the half of the rotated pairs that turns slowest,
    (head_dim,)."""
    half = head_dim // 2
    return torch.arange(head_dim, device=device) % half >= half - half // 2


def products(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Outputs of linear layers with the same input. Compiled for a GPU, they are one product: each
    of several small ones leaves a part of the GPU idle. Layers in fp8 have products of their
    own."""
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    if not (torch.compiler.is_compiling() and x.is_cuda and len(linear) == len(layers)):
        return [layer(x) for layer in layers]
    joined = torch.cat([layer.weight for layer in linear])
    return F.linear(x, joined).split([layer.out_features for layer in linear], dim=-1)


def stream(x: Tensor) -> Tensor:
    """The residual stream: bf16 under bf16 autocast, as in nanochat, otherwise fp32. fp16 has too
    small a range for it. Figures: docs/gpus.md."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        return x.to(torch.bfloat16)
    return x


class Attention(nn.Module):
    def __init__(self, shape: ModelDims) -> None:
        super().__init__()
        self.heads, self.key_offset = shape.heads, shape.key_offset
        # Three matrices instead of one: Muon makes each of them orthogonal separately.
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads)
            for part in products(x, self.query, self.key, self.value)
        )
        # In this layout and order a compiled block needs one kernel for both. A rotation keeps the
        # norm, so the order does not matter otherwise.
        cos, sin = cos[:, None], sin[:, None]
        q, k = rotate(norm(q), cos, sin).to(v.dtype), rotate(norm(k), cos, sin).to(v.dtype)
        if self.key_offset:
            k = offset(k, torch.cat((k[:, :1], k[:, :-1]), dim=1))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    def __init__(self, shape: ModelDims, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, selective: bool = False) -> Tensor:
        if not selective:
            return self._forward(x, cos, sin)
        # Inside the block, so that a compiled one is one graph with its recomputation.
        out: Tensor = checkpoint(
            self._forward,
            x,
            cos,
            sin,
            use_reentrant=False,
            preserve_rng_state=self.dropout > 0,
            context_fn=keeping_products,
        )
        return out

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._drop(self.attention(norm(x), cos, sin))
        gate, up = products(norm(x), self.gate, self.up)
        # SwiGLU, arXiv:2002.05202
        return x + self._drop(self.down(F.silu(gate) * up))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class BlockGraph(nn.Module):
    """Successive blocks that are compiled as one graph. `selective`: all of them recompute
    selectively."""

    def __init__(self, blocks: Sequence[nn.Module], selective: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.selective = selective

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, selective: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin, selective=selective)
        return x


class GPT(nn.Module):
    """forward(inputs) returns logits; forward(inputs, targets) the mean loss in nats per token, or
    by `reduction` their sum or, as "none", the loss of each."""

    def __init__(
        self, shape: ModelDims, frugal: MemorySavings | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.shape = shape
        self.frugal = frugal or MemorySavings()
        self.dropout = dropout
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(TransformerBlock(shape, dropout) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        # Filled by compile_parts(). A list registers nothing: they share the model's blocks.
        self._graphs: list[BlockGraph] = []
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial weights: residual branches and head start at zero, so the first loss is exactly
        ln(vocab)."""
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.zeros_(self.head.weight)
        bound = (3 / self.shape.width) ** 0.5
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for matrix in (
                block.attention.query,
                block.attention.key,
                block.attention.value,
                block.gate,
                block.up,
            ):
                nn.init.uniform_(matrix.weight, -bound, bound)
            for matrix in (block.attention.proj, block.down):
                nn.init.zeros_(matrix.weight)
        head_dim = self.shape.width // self.shape.heads
        self.cos, self.sin = rotations(self.shape.max_seq_len, head_dim)

    def compile_parts(self, together: int = 1) -> None:
        """torch.compile blocks and the loss with its logits, not the whole model (as torchtitan).

        `together` blocks are one graph, which is compiled once and serves the others too. Gradients
        of one graph are exchanged during the backward pass of the next. Checkpoints of whole blocks
        wrap compiled blocks. DDP's own splitter would cut a graph at the borders of its buckets,
        and some versions of it reject the checkpoint of a selective block.
        """
        from torch._inductor import config as inductor  # takes a second

        torch._dynamo.config.optimize_ddp = False
        # Every call would check shapes that never change, in Python: 7 % of the host's time.
        inductor.size_asserts = inductor.alignment_asserts = False
        # Gradients that are joined for products() are written into their places, not selected
        # element by element from reads of all; torch before 2.13 has no setting for it.
        if hasattr(inductor, "max_complex_pointwise_cat_inputs"):
            inductor.max_complex_pointwise_cat_inputs = 1
        again, blocks = self.frugal.blocks, list(self.blocks)
        plain = again + self.frugal.selective
        for block in blocks[:again]:
            block.compile(dynamic=False)
        self._graphs = [
            BlockGraph(blocks[at : min(at + together, end)], selective)
            for start, end, selective in ((again, plain, True), (plain, len(blocks), False))
            for at in range(start, end, together)
        ]
        for graph in self._graphs:
            graph.compile(dynamic=False)
        self._chunk = torch.compile(self._chunk, dynamic=False)  # type: ignore[method-assign]

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """inputs, targets: (batch, T) int64, T ≤ max_seq_len; a target of −1 is ignored."""
        length = inputs.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = stream(norm(self.embedding(inputs)))
        x = self._through_blocks(x, cos, sin)
        x = norm(x)
        if targets is None:
            return self.logits(x)
        if reduction == "none":
            return self._each(x.flatten(0, 1), targets.flatten()).view_as(targets)
        nats = self._nats(x.flatten(0, 1), targets.flatten())
        return nats if reduction == "sum" else nats / (targets != -1).sum()

    def _through_blocks(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        training, again = torch.is_grad_enabled(), self.frugal.blocks
        for block in islice(self.blocks, again):
            if training:
                x = checkpoint(
                    block, x, cos, sin, use_reentrant=False, preserve_rng_state=self.dropout > 0
                )
            else:
                x = block(x, cos, sin)
        for graph in self._graphs:
            x = graph(x, cos, sin, training and graph.selective)
        if not self._graphs:
            for number, block in enumerate(islice(self.blocks, again, None)):
                x = block(x, cos, sin, selective=training and number < self.frugal.selective)
        return x

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(x).float()
        return SOFTCAP * torch.tanh(logits / SOFTCAP)

    def _nats(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the loss over all positions; x (positions, width). A chunk's logits exist only
        while it is computed."""
        if self.frugal.chunks == 1:
            return self._chunk(x, targets)
        size = -(-len(x) // self.frugal.chunks)
        pairs = list(zip(x.split(size), targets.split(size), strict=True))
        if not torch.is_grad_enabled():
            return torch.stack([self._chunk(*pair) for pair in pairs]).sum()
        return torch.stack(
            [
                checkpoint(self._chunk, *pair, use_reentrant=False, preserve_rng_state=False)
                for pair in pairs
            ]
        ).sum()

    def _each(self, x: Tensor, targets: Tensor) -> Tensor:
        """Loss of each position, (positions,); 0 where it is ignored. Without gradients."""
        size = -(-len(x) // self.frugal.chunks)
        parts = zip(x.split(size), targets.split(size), strict=True)
        return torch.cat(
            [
                F.cross_entropy(self.logits(a), b, ignore_index=-1, reduction="none")
                for a, b in parts
            ]
        )

    def _chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), targets, ignore_index=-1, reduction="sum")
