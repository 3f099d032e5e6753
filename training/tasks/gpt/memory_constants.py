"""Constants of the memory formula (training/tasks/gpt/memory.py): counted from the tensors that
autograd keeps of Duet's model, and compared with fake tensors and real runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.tasks.gpt.memory import StepWorkload

BRANCHES = 2  # of a block, attention and MLP: each has a dropout


@dataclass(frozen=True)
class Constants:
    """Bytes per token and unit of width (`logits`: per token and vocabulary entry)."""

    kept: float  # by a block for its backward pass
    products: float  # by a block that is recomputed selectively
    # in addition, at the peak of the last block's backward pass: of one that recomputes nothing,
    # selectively, or everything
    work: float
    work_selective: float
    work_whole: float
    ends: int  # embedding and last norm
    logits: int  # logits and the loss's tensors, forward and backward, at their peak
    head: int = 0  # per weight of the head at that peak: its gradient, not yet fp32


def of(load: StepWorkload) -> Constants:
    found = _without_dropout(load)
    if not load.dropout:
        return found
    # Each dropout keeps a mask of bytes, except in eager steps on a CPU: there it keeps factors, in
    # the type of its input. A recomputed block has them in its backward pass.
    mask = 1 if load.cuda or load.compiled else 2 if load.bf16 else 4
    kept = BRANCHES * mask
    return replace(
        found,
        kept=found.kept + kept,
        work_selective=found.work_selective + kept,
        work_whole=found.work_whole + kept,
    )


def _without_dropout(load: StepWorkload) -> Constants:
    if load.fp8:
        # Compiled blocks keep inputs of products in fp8; eager casts to it have fp32 temporaries.
        return (
            Constants(26.8, 22.7, 19.7, 19.7, 44.4, 7, 2, 2)
            if load.compiled
            else Constants(41.4, 22.7, 31.8, 50.7, 71.2, 7, 16)
        )
    if load.compiled:
        if load.fp16:
            return Constants(38.0, 24.7, 11.8, 21.9, 45.2, 10, 2, 2)
        if load.bf16:
            return Constants(36.1, 22.7, 11.7, 20.2, 45.5, 7, 2, 2)
        return Constants(74.1, 45.4, 24.8, 44.6, 94.1, 8, 8)
    if not load.cuda:  # on which a norm keeps more: it is not one operator there
        if load.fp16:
            return Constants(55.4, 24.7, 20.2, 41.3, 62, 8, 16)
        if load.bf16:
            return Constants(49.4, 22.7, 21.2, 38.3, 59, 7, 16)
        return Constants(82.8, 45.4, 21.5, 58.9, 100.3, 8, 16)
    if load.fp16:
        return Constants(52.1, 24.8, 4.0, 36.0, 57.7, 10, 16)
    if load.bf16:
        return Constants(41.9, 22.7, 7.0, 30.1, 50.6, 7, 16)
    return Constants(82.6, 45.4, 24.2, 60.2, 102.1, 8, 16)
