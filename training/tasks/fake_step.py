"""Measures a training step of any task by fake tensors, in a separate process started by
training.tasks.measurement.

Model and optimizer are the task's; the batch has the shapes of two samples of its data. The answer
is one JSON object on standard output; output of the user's file goes to standard error.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from training import tasks
from training.core.messages import msg
from training.tasks import base, fake_memory
from training.tasks.measurement import Question
from training.tasks.memory import Unavailable, may_compress, pinned
from training.tasks.optim import Optimizers
from training.tasks.sample_memory import SampleLoad, SampleStep

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

EPOCH_STEPS = 50  # minimum steps per epoch if the micro-batch may be any power of two
LARGEST = 1 << 16
CPU = torch.device("cpu")


class NoData(RuntimeError):
    """There is no sample from which to take shapes."""


@dataclass(frozen=True)
class Height:
    """Bytes at the peak of one step."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    average: int  # of the weights
    pinned: int  # of a checkpoint's copy
    late: int  # see SampleLoad

    @property
    def rest(self) -> int:
        return self.peak - self.parameters - self.gradients - self.optimizer


class FakeTraining:
    """The task with two of its samples; each measurement creates a new model and optimizer."""

    def __init__(self, question: Question) -> None:
        first = question.sizes[0] if question.sizes else 1
        self.question = question
        plan = {"config": question.config | {"device_batch_size": first}, "task": question.task}
        # the only fields of a plan that a sample task reads
        self.task = tasks.make(cast("Plan", plan), CPU, None)
        rows = self.task.rows("train")
        self.samples = 0 if rows is None else len(rows)
        if rows is None or not self.samples:
            raise NoData(msg("tasks.fake.empty"))
        self.batch = rows.rows(list(range(min(2, self.samples))))
        self._heights: dict[int, Height] = {}

    def height(self, size: int) -> Height:
        if size not in self._heights:
            self._heights[size] = self._measured(size)
        return self._heights[size]

    def load(self, size: int) -> SampleLoad:
        """Measure with a second micro-batch size, never a single sample, which batch norm
        rejects."""
        other = max(2, size // 2) if size > 2 else 2 * size
        here, there = self.height(size), self.height(other)
        return self._load(size, (here.rest - there.rest) // (size - other))

    def fits(self, size: int) -> bool:
        room = self.question.room
        return room is None or SampleStep(self._load(size)).estimate.needed <= room

    def _load(self, size: int, per_sample: int = 0) -> SampleLoad:
        here, asked = self.height(size), self.question
        return SampleLoad(
            size,
            here.parameters,
            here.gradients,
            here.optimizer,
            here.rest - per_sample * size,
            per_sample,
            bf16=asked.bf16,
            cuda=asked.cuda,
            ranks=asked.ranks,
            total=asked.total,
            average=here.average,
            pinned=here.pinned,
            shared=asked.shared,
            late=here.late,
            compressed=may_compress(self.task.config),
        )

    def _measured(self, size: int) -> Height:
        asked, self.task.config.device_batch_size = self.question, size
        torch.manual_seed(self.task.config.seed)
        with fake_memory.fake_mode(allow_non_fake_inputs=True) as mode:
            model = self._model(mode)
            optimizer = self.task.optimizers(model)
            if asked.cuda:
                _as_on_a_gpu(optimizer, fp16=asked.fp16)
            # The batch already exists: no sample is read under fake tensors.
            batch = self.task.arrive(self._batch(size))
            tensors: list[torch.Tensor] = []
            base.mapped(batch, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
            step = partial(
                fake_memory.step_peak,
                *(model, optimizer, tensors, lambda: self.task.checked_loss(model, batch)),
                autocast=torch.bfloat16 if asked.bf16 else None,
                cuda=asked.cuda,
            )
            peak = step()
            # the next batch (training.trainer.prefetch)
            ahead = _bytes(tensors) if asked.cuda else 0
            late = peak - step(held=False) if asked.ranks == 1 and asked.total <= size else 0
            average = _average(model) if self.task.config.ema else []
            stored = [*(one.nbytes for one in [*_stored(model), *_state(optimizer)]), *average]
            return Height(
                _bytes([*model.parameters(), *model.buffers()]),
                _bytes(_gradients(model)),
                _bytes(_state(optimizer)),
                peak + ahead,
                sum(average),
                sum(map(pinned, stored)),
                late,
            )

    def _model(self, mode: Any) -> nn.Module:
        """The model in fake tensors; if a constructor needs values (a pretrained file, .item()), it
        is made with real tensors and then converted."""
        from torch._subclasses.fake_tensor import FakeCopyMode

        try:
            return self.task.checked_model()
        except Exception:
            # a real error is raised again below, where the model is made with real tensors
            from torch._subclasses.fake_tensor import unset_fake_temporarily

            with unset_fake_temporarily():
                real = self.task.checked_model()
            with FakeCopyMode(mode):
                return copy.deepcopy(real)

    def _batch(self, size: int) -> Any:
        """A batch of `size` samples with the shape of the two."""
        count = self.task.count(self.batch)

        def grown(tensor: torch.Tensor) -> torch.Tensor:
            of_samples = tensor.dim() > 0 and tensor.shape[0] == count
            return torch.zeros(
                (size, *tensor.shape[1:]) if of_samples else tensor.shape, dtype=tensor.dtype
            )

        return base.mapped(self.batch, grown)


def _as_on_a_gpu(optimizer: Optimizers, *, fp16: bool) -> None:
    """Where a user has not chosen, torch's optimizers update all weights together on a GPU, with
    temporary copies of all of them, and one by one on the CPU."""
    if fp16:
        optimizer.skip_on_device()
    for part in optimizer.parts:
        for group in part.param_groups:
            chosen = group.get("fused") is not None or group.get("differentiable")
            refused = isinstance(group.get("lr"), torch.Tensor)
            if group.get("foreach", True) is None and not chosen and not refused:
                group["foreach"] = True


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _average(model: nn.Module) -> list[int]:
    """Bytes of the average of each weight that is trained (training.trainer.weight_average)."""
    return [
        weight.numel() * max(4, weight.element_size())
        for weight in model.parameters()
        if weight.requires_grad
    ]


def _stored(model: nn.Module) -> list[torch.Tensor]:
    return [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]


def _state(optimizer: Optimizers) -> list[torch.Tensor]:
    states = [state for part in optimizer.parts for state in part.state.values()]
    return [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Each allocation counted once: weights may be tied."""
    return sum(
        {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values()
    )


def answer(question: Question, loaded: Callable[[], object] = int) -> dict[str, object]:
    """`loaded`: called once the data are."""
    training = FakeTraining(question)
    loaded()
    sizes = question.sizes or _powers(training.samples // (question.ranks * EPOCH_STEPS))
    low, high = 0, len(sizes) - 1  # the largest size that fits is in this range
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if training.fits(sizes[middle]) else (low, middle - 1)
    load = training.load(sizes[low])
    return {"load": vars(load), "fits": training.fits(sizes[low]), "of": len(sizes)}


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, min(most, LARGEST)).bit_length())]


def reason(error: BaseException, file: str | None) -> str:
    """Why the step cannot be measured, with the last line reached in the user's file."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if file and frame.filename == file
    ]
    where = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return msg("tasks.fake.depends_on_values", func=error.func, where=where)
    if isinstance(error, (Unavailable, NoData)):
        return str(error)
    return f"{type(error).__name__}: {error}{where}"


def main() -> int:
    out = os.dup(1)
    os.dup2(2, 1)
    asked: Mapping[str, Any] = json.load(sys.stdin)
    question = Question(**asked)
    try:
        # its signal ends this process, whatever that computes
        limited = partial(signal.setitimer, signal.ITIMER_REAL, question.step_s)
        found = answer(question, limited)
    except (
        Exception,
        SystemExit,
    ) as error:
        # an error in the user's code: the plan continues without the estimate and reports why
        found = {"why": reason(error, question.task["file"])}
    with os.fdopen(out, "w") as stream:
        json.dump(found, stream)
    return 0
