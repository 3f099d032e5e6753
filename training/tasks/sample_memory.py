"""Memory of a step of a task that counts samples: measured by fake tensors
(training.tasks.fake_step), as a function of the micro-batch. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, cast

from training.config import batch
from training.config.schema import Config
from training.core.messages import msg
from training.tasks.memory import (
    CONTEXT,
    StepNeeds,
    exchanged_copies,
    gib,
    with_ample_margin,
    with_margin,
)

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import MemoryRecord, StepRecord


@dataclass(frozen=True)
class SampleLoad:
    """Measured bytes and what else the memory depends on. Activations are linear in the
    micro-batch, from two measurements."""

    sequences: int  # samples per micro-batch of one rank
    parameters: int  # including buffers
    gradients: int
    optimizer: int
    fixed: int  # further bytes at the peak, independent of the micro-batch
    per_sample: int  # and per sample
    bf16: bool  # or fp16, which takes as much
    cuda: bool
    ranks: int
    total: int = 0  # samples per optimizer step, all ranks; 0: one micro-batch each
    average: int = 0  # moving average of the weights
    pinned: int = 0  # copy of a checkpoint of a GPU training; 0: measured by an earlier version
    shared: bool = False  # the GPU has the memory of the host
    late: int = 0  # bytes by which the peak is lower where no gradients precede the backward pass
    compressed: bool = False  # gradients, between the ranks

    @property
    def holds_gradients(self) -> bool:
        """Whether a forward pass finds gradients in memory: DDP's buckets, or those of the
        micro-batch before."""
        return self.ranks > 1 or self.accumulates

    @property
    def accumulates(self) -> bool:
        return self.total > self.sequences * self.ranks


@dataclass(frozen=True)
class SampleEstimate:
    """Bytes per rank at the peak of a step."""

    parameters: int
    # DDP's buckets, with accumulation over several ranks the accumulated gradients, and with
    # compression copies of them
    gradients: int
    optimizer: int
    # including the batch; or the optimizer's temporary memory if that peak is higher
    activations: int
    context: int
    saved: int  # checkpoint copy, on rank 0, in the same memory
    average: int = 0  # of the weights

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def needed(self) -> int:
        return with_margin(self.total)

    @property
    def tight(self) -> int:
        return with_ample_margin(self.total)

    def record(self) -> MemoryRecord:
        margins = {
            "total_bytes": self.total,
            "needed_bytes": self.needed,
            "tight_bytes": self.tight,
        }
        return cast(
            "MemoryRecord",
            {f"{name}_bytes": value for name, value in asdict(self).items()} | margins,
        )

    def sentence(self) -> str:
        copy = msg("tasks.sample.memory.average", average=gib(self.average)) if self.average else ""
        copy += msg("tasks.sample.memory.saved", saved=gib(self.saved)) if self.saved else ""
        if self.context:
            copy += msg("tasks.sample.memory.context", context=gib(self.context))
        return msg(
            "tasks.sample.memory.estimate",
            total=gib(self.total),
            parameters=gib(self.parameters),
            gradients=gib(self.gradients),
            optimizer=gib(self.optimizer),
            activations=gib(self.activations),
            copy=copy,
            needed=gib(self.needed),
        )


@dataclass(frozen=True)
class SampleStep(StepNeeds):
    load: SampleLoad

    @property
    def estimate(self) -> SampleEstimate:
        load = self.load
        return SampleEstimate(
            parameters=load.parameters,
            gradients=load.gradients * (2 if load.ranks > 1 and load.accumulates else 1)
            + (exchanged_copies(load.gradients, load.ranks) if load.compressed else 0),
            optimizer=load.optimizer,
            activations=max(0, load.fixed + load.per_sample * load.sequences - self._late),
            context=CONTEXT if load.cuda else 0,
            saved=self._saved,
            average=load.average,
        )

    @property
    def _late(self) -> int:
        return 0 if self.load.holds_gradients else self.load.late

    @property
    def _saved(self) -> int:
        load = self.load
        if load.cuda:
            return load.pinned if load.shared else 0
        return load.parameters + load.optimizer + load.average

    @property
    def saving(self) -> int:
        return self.load.pinned or super().saving

    @property
    def gradient_bytes(self) -> int:
        return self.load.gradients

    @property
    def on_gpu(self) -> bool:
        return self.load.cuda

    @property
    def source(self) -> str:
        precision = "16-bit" if self.load.bf16 else "fp32"
        return msg("tasks.sample.memory.source", precision=precision)

    def resized(self, sequences: int | None = None, ranks: int | None = None) -> SampleStep:
        size = sequences or self.load.sequences
        # they replace activations: fewer of a smaller micro-batch
        late = self.load.late * min(size, self.load.sequences) // self.load.sequences
        load = replace(self.load, sequences=size, late=late)
        if ranks is None:
            return SampleStep(load)
        total = self.load.total or self.load.sequences * self.load.ranks
        return SampleStep(replace(load, ranks=ranks, total=total))

    def suggestions(self, config: Config, ranks: int, room: int) -> list[FieldValues]:
        """A smaller micro-batch, the only known way to save memory."""
        now, total = self.load.sequences, self.load.total
        sizes = batch.device_choices(1, ranks, total) if total else range(1, now)
        fitting = [
            size for size in sizes if size < now and self.resized(size).estimate.needed <= room
        ]
        return [{"device_batch_size": fitting[-1]}] if fitting else []

    def record(self) -> StepRecord:
        return {**self.estimate.record(), "load": asdict(self.load)}
