"""Expected end and cost of a training, logged once its first steps have been measured."""

from __future__ import annotations

import statistics
import time

from training.core import log, units
from training.core.messages import msg
from training.data.duration import UNLIMITED
from training.trainer.train_state import TrainState

SKIPPED, MEASURED = 2, 20  # steps: the first ones warm up
SHORTEST_S = 60.0  # of the rest, for which the forecast is worth a line


class Forecast:
    """Of one start, on rank 0."""

    def __init__(self, session: TrainState) -> None:
        self._session = session
        self._steps_ms: list[float] = []

    def step(self, step: int, took_ms: float, used_s: float) -> None:
        """After each step. `used_s`: of --max_time."""
        if len(self._steps_ms) >= SKIPPED + MEASURED:
            return
        self._steps_ms.append(took_ms)
        if len(self._steps_ms) < SKIPPED + MEASURED:
            return
        left = self.left(step, used_s)
        if left[0] >= SHORTEST_S:
            self._log(step, *left)

    def left(self, step: int, used_s: float) -> tuple[float, int]:
        """(seconds, steps) until the end, by the steps or by the time."""
        total, limit = self._session.length.total_steps, self._session.time_limit
        step_s = statistics.median(self._steps_ms[SKIPPED:]) / 1000
        seconds = (total - step) * step_s if total < UNLIMITED else float("inf")
        if limit:
            seconds = min(seconds, max(0.0, limit.limit_s - used_s))
        return seconds, min(total - step, int(seconds / step_s))

    def _log(self, step: int, seconds: float, steps: int) -> None:
        world, unit = self._session.world, self._session.task.unit
        hours = units.amount(world.world_size * seconds / 3600)
        cost = (
            msg("trainer.forecast.gpu_hours", hours=hours)
            if world.device.type == "cuda"
            else msg("trainer.forecast.rank_hours", hours=hours)
        )
        begun = self._session.position  # its steps may have had another batch
        more = (step + steps - begun.step) * self._session.batch.total_tokens
        amount = units.count(begun.tokens + more)
        end = units.clock(time.time() + seconds, "%Y-%m-%d %H:%M")
        left = units.duration(seconds)
        text = msg("trainer.forecast.text", end=end, left=left, cost=cost, amount=amount, unit=unit)
        log.info(text)
