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

    The peak is linear in the number of plain and of checkpointed blocks, so three models of two or
    three blocks with the real width, batch and vocabulary are measured, in a second each, and
    extrapolated. Muon's state held by other ranks is subtracted; memory held for accumulation and
    checkpoints is added.
    """
    plain, again = load.depth - load.blocks, load.blocks
    p, a = min(plain, 1), min(again, 1)
    base = step_peak(load, p, a)
    more_plain = step_peak(load, p + 1, a) - base if plain > p else 0
    more_again = step_peak(load, p, a + 1) - base if again > a else 0
    return (
        base
        + (plain - p) * more_plain
        + (again - a) * more_again
        - load.elsewhere
        + load.second_gradients
        + load.saved
    )


def step_peak(load: StepWorkload, plain: int, again: int) -> int:
    """Peak of a model with these numbers of plain and checkpointed blocks of the load's width."""
    shape = Slice(plain + again, load.vocab, load.seq_len, load.depth)
    with fake_memory.fake_mode():
        model = GPT(shape, MemorySavings(again, load.chunks))
        optimizer = optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))
        tokens = torch.zeros(load.sequences, load.seq_len, dtype=torch.int64)
        return fake_memory.step_peak(
            model, optimizer, [tokens], lambda: model(tokens, tokens), bf16=load.bf16
        )
