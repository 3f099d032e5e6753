"""What the ranks tell each other in a step: one small reduction carries loss, health and the wish to stop."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from training.distributed import World
from training.errors import Exit

STOP_SIGNALS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.PREEMPTED, signal.SIGUSR1: Exit.PREEMPTED}


class StopRequest:
    """TERM, USR1 or Ctrl-C: the current step is finished and a checkpoint saved. All ranks stop after the same step,
    since the wish travels with the loss."""

    def __init__(self) -> None:
        self.code = Exit.DONE

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.code = STOP_SIGNALS[signal.Signals(number)]


class NotFinite(RuntimeError):
    """A loss became NaN or infinite. All ranks raise it; `rank` is the one whose loss it is."""

    def __init__(self, loss: float, rank: int, step: int) -> None:
        super().__init__(f"loss is {loss} on rank {rank} at step {step}")
        self.rank = rank


@dataclass
class StepReport:
    """What all ranks know after a step: mean loss, and the exit code of a wish to stop (0: none)."""

    loss: float
    stop: int


class StepExchange:
    """Starts the reduction after the backward pass and reads it after the optimizer step, so that it costs no waiting.

    One slot a rank holds its loss (a sum with zeros elsewhere), so the rank of a NaN is known without another collective.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._work: dist.Work | None = None
        self._values = torch.zeros(world.world_size + 2, dtype=torch.float32, device=world.device)

    def start(self, loss: torch.Tensor, stop: int) -> None:
        self._values = torch.zeros_like(self._values)
        self._values[self.world.rank] = loss
        self._values[-2 if stop == Exit.PREEMPTED else -1] = float(stop != 0)
        if self.world.world_size > 1:
            self._work = dist.all_reduce(self._values, async_op=True)

    def finish(self, step: int) -> StepReport:
        if self._work is not None:
            self._work.wait()
        *losses, preempted, interrupted = self._values.tolist()
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NotFinite(loss, rank, step)
        stop = Exit.INTERRUPTED if interrupted else Exit.PREEMPTED if preempted else Exit.DONE
        return StepReport(sum(losses) / len(losses), int(stop))
