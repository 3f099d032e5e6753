"""The peak of a training step by fake tensors: our model and optimizer run without memory and without arithmetic, and torch
counts what would be alive (source: torch/distributed/_tools/mem_tracker.py, torch/_subclasses).

What it can not see: torch.compile (it measures the eager step), a GPU's own kernels and autocast list (the tensors are CPU
tensors, since a torch for the CPU can not fake others), CUDA's context, fragmentation. DDP's buckets are the gradients
(gradient_as_bucket_view), which are alive from the start here as they are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.config.schema import Config
from training.tasks.gpt import optim
from training.tasks.gpt.memory import StepWorkload
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import WIDTH_PER_LAYER, ModelDims


class Unavailable(RuntimeError):
    """This torch does not have the private parts that are needed; the text says which."""


@dataclass(frozen=True)
class Slice(ModelDims):
    """A model with the width of `full_depth` blocks, but fewer of them."""

    full_depth: int = 0

    @property
    def width(self) -> int:
        return self.full_depth * WIDTH_PER_LAYER


def peak(load: StepWorkload) -> int:
    """Bytes at the peak of an eager step of this load. Raises Unavailable.

    The peak is linear in the number of plain and of checkpointed blocks, so three models of two or three blocks with the
    real width, batch and vocabulary are measured and extrapolated: a second each. What the other ranks hold of Muon's state is
    taken off, what accumulation and checkpoints hold beside a step is added.
    """
    plain, again = load.depth - load.blocks, load.blocks
    p, a = min(plain, 1), min(again, 1)
    base = step_peak(load, p, a)
    more_plain = step_peak(load, p + 1, a) - base if plain > p else 0
    more_again = step_peak(load, p, a + 1) - base if again > a else 0
    return base + (plain - p) * more_plain + (again - a) * more_again - load.elsewhere + load.second_gradients + load.saved


def step_peak(load: StepWorkload, plain: int, again: int) -> int:
    """The same for so many plain and checkpointed blocks of the load's width."""
    try:
        from torch._subclasses import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no fake tensors with a memory tracker as 2.9 to 2.13 have: {error}") from error
    shape = Slice(plain + again, load.vocab, load.seq_len, load.depth)
    with FakeTensorMode():
        model = GPT(shape, MemorySavings(again, load.chunks))
        optimizer = optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))
        tokens = torch.zeros(load.sequences, load.seq_len, dtype=torch.int64)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)  # DDP's buckets
        optimizer.step()  # makes its state
        tracker = MemTracker()
        tracker.track_external(model, *optimizer.parts, tokens)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=load.bf16):
                loss = model(tokens, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        snapshot = tracker.get_tracker_snapshot("peak")
    return sum(int(device["Total"]) for device in snapshot.values())
