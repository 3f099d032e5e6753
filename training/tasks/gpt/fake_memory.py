"""Peak memory of a GPT's training step by fake tensors (limits: training.tasks.fake_memory)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.config.schema import Config
from training.tasks import fake_memory
from training.tasks.gpt import optim
from training.tasks.gpt.memory import StepWorkload
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import WIDTH_PER_LAYER, ModelDims


@dataclass(frozen=True)
class Slice(ModelDims):
    """A model with the width of `full_depth` blocks but fewer blocks."""

    full_depth: int = 0

    @property
    def width(self) -> int:
        return self.full_depth * WIDTH_PER_LAYER


def peak(load: StepWorkload) -> int:
    """Bytes at the peak of an eager step of this load. Raises Unavailable.

    The peak is linear in the number of blocks of each kind (plain, checkpointed as a whole or
    selectively), so models of at most four blocks with the real width, batch and vocabulary are
    measured, in a second each, and extrapolated. Muon's state held by other ranks is subtracted;
    memory held for accumulation, checkpoints and the average of the weights is added.
    """
    counts = (load.plain, load.blocks, load.selective)
    few = [min(count, 1) for count in counts]
    base = total = step_peak(load, *few)
    for kind, count in enumerate(counts):
        if count > 1:
            more = [one + (number == kind) for number, one in enumerate(few)]
            total += (count - 1) * (step_peak(load, *more) - base)
    return total - load.elsewhere + load.second_gradients + load.saved + load.average


def step_peak(load: StepWorkload, plain: int, again: int, selective: int = 0) -> int:
    """Peak of a model with these numbers of blocks of the load's width: plain, checkpointed as a
    whole, and selectively."""
    shape = Slice(plain + again + selective, load.vocab, load.seq_len, load.depth)
    with fake_memory.fake_mode():
        model = GPT(shape, MemorySavings(again, load.chunks, selective))
        optimizer = optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))
        tokens = torch.zeros(load.sequences, load.seq_len, dtype=torch.int64)
        return fake_memory.step_peak(
            model, optimizer, [tokens], lambda: model(tokens, tokens), autocast=half_precision(load)
        )


def half_precision(load: StepWorkload) -> torch.dtype | None:
    """Of autocast; None: fp32."""
    if not load.bf16:
        return None
    return torch.float16 if load.fp16 else torch.bfloat16
