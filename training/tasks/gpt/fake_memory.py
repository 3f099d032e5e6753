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
from training.tasks.optim import Optimizers


@dataclass(frozen=True)
class Slice(ModelDims):
    """A model with the width of `full_depth` blocks but fewer blocks."""

    full_depth: int = 0

    @property
    def width(self) -> int:
        return self.full_depth * WIDTH_PER_LAYER


def peak(load: StepWorkload) -> int:
    """Bytes at the peak of an eager step of this load. Raises Unavailable.

    The peaks of the forward pass (at the loss, with the weights in 16 bits) and of the backward
    pass (in a block) are linear in the number of blocks of each kind (plain, checkpointed as a
    whole or selectively), so models of at most four blocks with the real width, batch and
    vocabulary are measured, in a second each, and extrapolated. That of the update is not, because
    Muon's batches have a limit: the whole model is measured. Muon's state held by other ranks is
    subtracted; memory held for accumulation, compressed gradients, checkpoints and the average of
    the weights is added.
    """
    counts = (load.plain, load.blocks, load.selective)
    few = [min(count, 1) for count in counts]
    base = gradients_peaks(load, *few)
    totals = list(base)
    for kind, count in enumerate(counts):
        if count > 1:
            more = [one + (number == kind) for number, one in enumerate(few)]
            for pass_, found in enumerate(gradients_peaks(load, *more)):
                totals[pass_] += (count - 1) * (found - base[pass_])
    total = max(*totals, update_peak(load))
    return total - load.elsewhere + load.second_gradients + load.saved + load.average


def gradients_peaks(
    load: StepWorkload, plain: int, again: int, selective: int = 0
) -> tuple[int, int]:
    """Peaks of forward and backward pass of a model with these numbers of blocks of the load's
    width: plain, checkpointed as a whole, and selectively."""
    with fake_memory.fake_mode():
        model, optimizer = _made(load, plain, again, selective)
        tokens = _tokens(load)
        return fake_memory.gradients_peaks(
            model,
            optimizer,
            [tokens],
            lambda: model(tokens, tokens),
            autocast=half_precision(load),
            held=load.holds_gradients,
        )


def update_peak(load: StepWorkload) -> int:
    """Peak of the update of the whole model."""
    with fake_memory.fake_mode():
        model, optimizer = _made(load, load.plain, load.blocks, load.selective)
        return fake_memory.update_peak(model, optimizer, [_tokens(load)])


def _made(load: StepWorkload, plain: int, again: int, selective: int) -> tuple[GPT, Optimizers]:
    shape = Slice(plain + again + selective, load.vocab, load.seq_len, full_depth=load.depth)
    model = GPT(shape, MemorySavings(again, load.chunks, selective), load.dropout)
    return model, optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))


def _tokens(load: StepWorkload) -> torch.Tensor:
    return torch.zeros(load.sequences, load.seq_len, dtype=torch.int64)


def half_precision(load: StepWorkload) -> torch.dtype | None:
    """Of autocast; None: fp32."""
    if not load.bf16:
        return None
    return torch.float16 if load.fp16 else torch.bfloat16
