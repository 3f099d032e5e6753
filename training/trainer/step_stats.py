"""Data exchanged by the ranks in a step: one small reduction carries loss, health and stop
requests."""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.core.errors import Exit
from training.host import process
from training.inspector.distributed import World
from training.inspector.step_timer import elapsed_s, moment

STOP_SIGNALS = {
    signal.SIGINT: Exit.INTERRUPTED,
    signal.SIGTERM: Exit.PREEMPTED,
    signal.SIGUSR1: Exit.PREEMPTED,
}
NO_CHECKSUM = NO_MEMORY = NO_TIME = -1.0  # unknown
SLOTS = 7  # numbers of each rank in the reduction: those of RankStep
# Reading the peak of GPU memory from torch takes some ten microseconds, reading the resident set
# from the kernel two.
GPU_MEMORY_EVERY = 10  # steps


class StopRequest:
    """TERM, USR1 or Ctrl-C: finish the current step and save a checkpoint. All ranks stop after the
    same step, since the request is sent with the loss."""

    def __init__(self) -> None:
        self.code = Exit.DONE

    def listen(self) -> None:
        for number in process.obeyed_stops():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.code = STOP_SIGNALS[signal.Signals(number)]


@dataclass(frozen=True)
class LocalStep:
    """This rank's work before the ranks wait for each other: fetch and forward of all
    micro-batches."""

    loss: torch.Tensor  # mean of its sequences, nats per token
    sequences: int
    compute_ms: float  # without waiting for others; as OwnTime.step_ms


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step. `checksum`: of its parameters before the step, or NO_CHECKSUM if
    not requested."""

    step: int
    sequences: int
    loss: float  # as in LocalStep
    checksum: float
    compute_ms: float | None = None  # None, as in the next: unknown
    memory: int | None = None  # bytes: peak allocated by torch on its GPU, or the resident set
    overflow: bool = False  # of fp16: its gradients were not finite


@dataclass(frozen=True)
class StepReport:
    """Result of a step, known to all ranks: every rank's share, the exit code of a stop request
    (0: none), the norm of the gradients before clipping, and the loss scale of fp16."""

    shares: list[RankStep]
    stop: int
    norm: float = 0.0
    scale: float | None = None
    used_s: float = 0.0  # of --max_time, by rank 0's clock

    @property
    def skipped(self) -> bool:
        """Whether the step changed neither weights nor optimizer state."""
        return any(s.overflow for s in self.shares)

    @property
    def loss(self) -> float:
        return sum(s.loss for s in self.shares) / len(self.shares)


@dataclass(frozen=True)
class PendingReport:
    """A step's figures on their way to the host. `values`: those of StepAllReduce; `norm`: of the
    gradients; `scale`: of fp16; `arrived`: the moment at which the host has them."""

    values: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor | None
    arrived: Any

    def read(self) -> StepReport:
        """Waits for the step on a GPU, if it has not ended yet."""
        if isinstance(self.arrived, torch.cuda.Event) and not self.arrived.query():
            self.arrived.synchronize()
        *slots, used_s, preempted, interrupted = self.values.tolist()
        rows = [slots[i : i + SLOTS] for i in range(0, len(slots), SLOTS)]
        shares = [
            RankStep(
                *(_whole(step), _whole(count), loss, checksum),
                None if compute_ms == NO_TIME else compute_ms,
                None if memory == NO_MEMORY else _whole(memory),
                overflow=overflow > 0,
            )
            for step, count, loss, checksum, compute_ms, memory, overflow in rows
        ]
        stop = Exit.INTERRUPTED if interrupted else Exit.PREEMPTED if preempted else Exit.DONE
        scale = None if self.scale is None else float(self.scale)
        return StepReport(shares, int(stop), float(self.norm), scale, used_s)


class StepAllReduce:
    """Starts the reduction after the backward pass and ends it after the optimizer step, so that
    no time is spent waiting. On a GPU the host does not wait at all: the figures are copied to
    pinned memory behind the step's work.

    Each rank has its own slots (a sum with zeros elsewhere), so that every rank knows everything
    about all ranks without another collective. float64: a checksum of 48 bits is exact.
    """

    def __init__(self, world: World) -> None:
        self.world, self._memory = world, MemoryUse(world.device)
        self._work: dist.Work | None = None
        self._values = torch.zeros(
            SLOTS * world.world_size + 3, dtype=torch.float64, device=world.device
        )

    def start(
        self,
        step: int,
        work: LocalStep,
        checksum: torch.Tensor | None,
        stop: int,
        overflow: torch.Tensor | None = None,
        used_s: float = 0.0,
    ) -> None:
        """`overflow`: 1.0 if this rank's gradients are not finite; None: not checked. `used_s`: of
        --max_time; that of rank 0 counts."""
        facts = [0.0] * len(self._values)
        at = SLOTS * self.world.rank
        facts[at : at + SLOTS] = (
            *(float(step), float(work.sequences), 0.0, NO_CHECKSUM),
            *(work.compute_ms, self._memory.now(), 0.0),
        )
        facts[-3] = used_s if self.world.rank == 0 else 0.0
        facts[-2 if stop == Exit.PREEMPTED else -1] = float(stop != 0)
        # One copy from pinned memory and no assignment of a number to a GPU's tensor: each of those
        # would wait until the backward pass has ended.
        on_gpu = self.world.device.type == "cuda"
        self._values = torch.tensor(facts, dtype=torch.float64, pin_memory=on_gpu).to(
            self.world.device, non_blocking=True
        )
        self._values[at + 2].copy_(work.loss, non_blocking=True)
        if checksum is not None:
            self._values[at + 3].copy_(checksum, non_blocking=True)
        if overflow is not None:
            self._values[at + 6].copy_(overflow, non_blocking=True)
        if self.world.world_size > 1:
            self._work = dist.all_reduce(self._values, async_op=True)

    def overflow(self) -> torch.Tensor:
        """1.0 if the gradients of any rank are not finite, else 0.0; on the device. DDP has spread
        most of them, but not those of weights that a task excludes from it."""
        self._wait()
        return (self._values[6:-3:SLOTS].sum() > 0).float()

    def finish(self, norm: torch.Tensor, scale: torch.Tensor | None = None) -> PendingReport:
        """`norm`: of the gradients, a scalar; equal on all ranks as the scale, so that neither is
        exchanged."""
        self._wait()
        norm = norm.detach()
        if self.world.device.type != "cuda":
            return PendingReport(self._values, norm, scale, moment(self.world.device))
        values, norm = _pinned(self._values), _pinned(norm)
        scale = None if scale is None else _pinned(scale)
        return PendingReport(values, norm, scale, moment(self.world.device))

    def _wait(self) -> None:
        """On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def _pinned(figures: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, complete when the GPU has come that far."""
    host = torch.empty_like(figures, device="cpu", pin_memory=True)
    return host.copy_(figures, non_blocking=True)


class OwnTime:
    """Time of data and forward passes of a rank, without waiting for others. On a GPU it is taken
    from events and known when the GPU has come that far, one or two steps later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None
        self._parts: list[tuple[Any, Any]] = []
        self._queued: deque[list[tuple[Any, Any]]] = deque(maxlen=8)  # steps
        self._ms = NO_TIME

    def begin(self) -> None:
        """Before the data of a micro-batch are read."""
        self._begun = moment(self._device)

    def end(self) -> None:
        """After its forward pass."""
        self._parts.append((self._begun, moment(self._device)))

    def step_ms(self) -> float:
        """Milliseconds of the newest step known, or NO_TIME; begins a new step."""
        parts, self._parts = self._parts, []
        if self._device.type != "cuda":
            return 1000 * sum(elapsed_s(begin, end) for begin, end in parts)
        self._queued.append(parts)
        while self._queued and all(end.query() for _, end in self._queued[0]):
            self._ms = 1000 * sum(elapsed_s(begin, end) for begin, end in self._queued.popleft())
        return self._ms


class MemoryUse:
    """Memory used by this rank in bytes, read without waiting for its GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._asked, self._last = device, 0, NO_MEMORY
        self._page = os.sysconf("SC_PAGE_SIZE")
        try:
            self._file = -1 if device.type == "cuda" else os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # there is no /proc
            self._file = -1

    def now(self) -> float:
        """Bytes; a GPU's value may be some steps old. NO_MEMORY: unknown."""
        if self._file >= 0:
            return float(int(os.pread(self._file, 64, 0).split()[1]) * self._page)
        # the first step has no optimizer state yet
        if self.device.type == "cuda" and (self._asked < 2 or self._asked % GPU_MEMORY_EVERY == 0):
            self._last = float(torch.cuda.max_memory_allocated(self.device))
        self._asked += 1
        return self._last


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else -1
