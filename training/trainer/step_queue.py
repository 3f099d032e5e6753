"""Steps whose figures have not been read yet.

On a GPU the host only queues work. It reads a step's figures while the GPU computes the next one,
so that it never waits for the step that it has just queued; what follows from them (a stop request,
a loss that is not finite) takes effect one step later, on all ranks after the same step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from training.core import heartbeat
from training.core.errors import Exit
from training.trainer import sanity_checks
from training.trainer.checkpoint import TrainProgress
from training.trainer.progress import Progress, Stopwatch
from training.trainer.step_stats import PendingReport
from training.trainer.train_state import TrainState


@dataclass(frozen=True)
class QueuedStep:
    """A step from `begun` to `position`, with learning rate `rate`. `since`: the moment from which
    its time counts; None: the end of the step before."""

    begun: TrainProgress
    position: TrainProgress
    rate: float
    report: PendingReport
    since: Any = None


class StepQueue:
    """Checks and records the steps of a training in order."""

    def __init__(self, session: TrainState, watch: Stopwatch) -> None:
        self._session, self._watch = session, watch
        self._lag = 1 if session.world.device.type == "cuda" else 0  # steps
        self._steps: deque[QueuedStep] = deque()

    def add(self, step: QueuedStep) -> None:
        self._steps.append(step)

    def read(self, progress: Progress, *, everything: bool) -> Exit:
        """Check and record the steps that are due; `everything`: the newest too, which waits for
        it. Returns the code of a stop request (then everything is read). Raises SanityCheckError on
        all ranks."""
        code, recorded = Exit.DONE, False
        while len(self._steps) > (0 if everything or code != Exit.DONE else self._lag):
            step = self._steps.popleft()
            if recorded:  # a GPU may need a whole step, "record" never does
                heartbeat.current.beat("optimizer")
            report = step.report.read()
            heartbeat.current.beat("record")
            recorded = True
            if self._session.loss_scale:
                self._session.loss_scale.count(report)
            if self._session.time_limit:
                self._session.time_limit.agree(report.used_s)
            try:
                sanity_checks.check_step(self._session, report, step.begun)
            except sanity_checks.SanityCheckError:
                # The card reports the phase and step of the heartbeat; the loop has begun the next.
                heartbeat.current.step = step.position.step
                heartbeat.current.beat("record")
                raise
            if step.since is not None:  # not when it began: the step before was unread then
                self._watch.restart(step.since)
            lap = self._watch.lap(step.report.arrived)
            progress.step(step.position, report, step.rate, lap)
            code = code or Exit(report.stop)
        return code
