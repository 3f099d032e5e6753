"""Text generation with a GPT: keys and values of earlier tokens are kept, so each new token is one
pass over one token.

Differs from the model's own forward pass by rounding only. When the context is full, its second
half becomes the beginning of a new one, so that a long text costs at most twice as much per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.tasks.gpt.model import GPT, norm, rotate, slow_pairs

COLDEST = 1e-6  # smaller temperatures overflow in fp32
DRAWN = 256  # uniform numbers per sample drawn at once


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0: always the most likely one; `top_k` 0: among all;
    sample i of a prompt is determined by `seed` + i, whatever the number of samples."""

    count: int  # maximum number of tokens
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0
    samples: int = 1  # of the same prompt, computed together
    stop: int | None = None  # a token that ends a sample
    known: int | None = None  # only tokens below this are drawn; None: all of the vocabulary


class Decoder:
    """A model with the keys and values of the tokens seen so far, for `samples` sequences of equal
    length up to `length` ≤ max_seq_len."""

    def __init__(self, model: GPT, samples: int, length: int) -> None:
        self.model, self.samples, self.length = model, samples, length
        self.used = 0
        self.heads = model.shape.heads
        self.dtype = model.head.weight.dtype  # of the products; sums are fp32
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.last: list[Tensor] = []  # keys of the last token, before the offset
        width = model.shape.width // self.heads
        self.slow = slow_pairs(width, model.head.weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits after the last of these tokens, (samples, vocab) fp32. tokens: (samples, n), or
        (1, n) at the beginning, for all samples."""
        start, count = self.used, tokens.size(1)
        assert start + count <= self.length and (count == 1 or not start)
        cos, sin = self.model.cos[start : start + count], self.model.sin[start : start + count]
        x = norm(self.model.embedding(tokens).float())
        for number, block in enumerate(self.model.blocks):
            x = x + block.attention.proj(self._attention(number, block.attention, x, cos, sin))
            y = norm(x).to(self.dtype)
            x = x + block.down(F.silu(block.gate(y)) * block.up(y))
        self.used += count
        return self.model.logits(norm(x[:, -1]).to(self.dtype)).expand(self.samples, -1)

    def _attention(
        self, number: int, part: torch.nn.Module, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        rows, count, width = x.shape
        y = norm(x).to(self.dtype)
        v = part.value(y).view(rows, count, self.heads, -1).transpose(1, 2)
        # Together: for one token the number of operations counts, not their size.
        both = torch.stack((part.query(y), part.key(y))).view(2, rows, count, self.heads, -1)
        q, k = norm(rotate(both.transpose(2, 3), cos, sin)).to(v.dtype)
        if self.model.shape.key_offset:
            k = self._offset(number, k)
        if not self.used:
            self._keep(number, k, v)
        else:
            self.keys[number][:, :, self.used : self.used + 1] = k
            self.values[number][:, :, self.used : self.used + 1] = v
            k, v = (kept[number][:, :, : self.used + 1] for kept in (self.keys, self.values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not self.used)
        return out.transpose(1, 2).reshape(rows, count, width)

    def _offset(self, number: int, k: Tensor) -> Tensor:
        if self.used:
            before = self.last[number].expand_as(k)
        else:
            before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
        # A view would keep all keys and queries of the prompt.
        self.last[number : number + 1] = [k[:, :, -1:].clone()]
        return torch.where(self.slow, before, k)

    def _keep(self, number: int, k: Tensor, v: Tensor) -> None:
        """The beginning of all samples; memory is allocated at the first one."""
        for kept, new in ((self.keys, k), (self.values, v)):
            if len(kept) == number:
                kept.append(new.new_empty(self.samples, self.heads, self.length, new.size(-1)))
            kept[number][:, :, : new.size(2)] = new

    def restart(self) -> None:
        self.used = 0


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Sequence[int],
    how: Sampling,
    each: Callable[[], None] = lambda: None,
    check: Callable[[Tensor], None] = lambda logits: None,
) -> Iterator[list[int | None]]:
    """The next token of every sample, step by step; None for a sample that has ended. `each()` is
    called before each step, `check()` with the first logits. A prompt longer than the context loses
    its beginning."""
    device, context = model.head.weight.device, model.shape.max_seq_len
    tokens = torch.tensor([list(prompt)[-context:]], device=device)
    decoder = Decoder(model, how.samples, min(context, tokens.size(1) + how.count))
    chances = _chances(how, device)
    seen = tokens.expand(how.samples, -1)  # of the context, in case it becomes full
    ended = [False] * how.samples
    for step in range(how.count):
        each()
        if decoder.used == context:
            decoder.restart()
            tokens = seen = seen[:, -(context // 2 or 1) :]
        logits = decoder.forward(tokens)[:, : how.known]
        if not step:
            check(logits)
        drawn = pick(logits, how, next(chances))
        tokens = drawn[:, None]
        seen = torch.cat((seen, tokens), dim=1)
        out: list[int | None] = []
        for number, token in enumerate(drawn.tolist()):
            ended[number] = ended[number] or token == how.stop
            out.append(None if ended[number] else token)
        if all(ended):
            return
        yield out


def _chances(how: Sampling, device: torch.device) -> Iterator[Tensor]:
    """A uniform number per sample and token, (samples,), from a generator per sample."""
    each = [torch.Generator().manual_seed(how.seed + number) for number in range(how.samples)]
    while True:
        block = torch.stack([torch.rand(DRAWN, generator=one) for one in each])
        yield from block.to(device).unbind(1)


def pick(logits: Tensor, how: Sampling, chance: Tensor) -> Tensor:
    """Tokens (samples,) drawn from logits (samples, vocab) by uniform numbers `chance` (samples,):
    the first token at which the sum of probabilities exceeds it."""
    if how.temperature == 0:
        return logits.argmax(-1)
    names = None
    if 0 < how.top_k < logits.size(-1):
        logits, names = logits.topk(how.top_k)
    sums = torch.softmax(logits / max(how.temperature, COLDEST), dim=-1).cumsum(-1)
    at = torch.searchsorted(sums, chance[:, None] * sums[:, -1:], right=True)
    at = at.clamp(max=logits.size(-1) - 1)
    return (at if names is None else names.gather(-1, at))[:, 0]
