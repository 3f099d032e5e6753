"""--max_time: the schedule and the end of a training follow rank 0's clock.

All ranks decide by the same figure: the time used as rank 0 measured it in a step that all ranks
have read (it is sent with the loss). It includes evaluations and checkpoints, and the time of
earlier starts, also of work that was lost.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from training.core.phase_timeouts import FIRST_STEPS
from training.core.read_backwards import backwards

if TYPE_CHECKING:
    from pathlib import Path

    from training.core.contracts.run_files import ManifestRecord
    from training.inspector.distributed import World

RECENT = 5  # steps: one that waited for a checkpoint is not typical
USED = "used_s"  # in metrics.jsonl and in the manifest of a checkpoint


class TimeLimit:
    """`limit_s`: of all starts together, of which `used_s` were used before this one. `planned`:
    steps after which the training would end anyway. `lag`: steps that are queued before the figures
    of one are read."""

    def __init__(self, limit_s: float, planned: int, used_s: float = 0.0, lag: int = 0) -> None:
        self.limit_s, self.planned, self.used_s, self._lag = limit_s, planned, used_s, lag
        self.start()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._read = 0  # steps of this start
        # Duration of the first two, which may compile. The clock is read before the optimizer's
        # step, so the time of its first one is in the second.
        self._first_s = 0.0
        self._evaluation_s = 0.0  # duration of the latest evaluation after them
        self._evaluated = False  # since the last step that was read

    def start(self) -> None:
        """The first step begins now."""
        self._began = time.monotonic() - self.used_s

    def now_s(self) -> float:
        """The time used by this rank's clock; that of rank 0 counts."""
        return time.monotonic() - self._began

    def agree(self, used_s: float) -> None:
        """Take the time of a step that has been read."""
        self._read += 1
        step_s = used_s - self.used_s
        if self._read <= FIRST_STEPS:
            self._first_s += step_s
        elif self._evaluated:
            self._evaluation_s = max(0.0, step_s - self._step_s())
        else:
            self._recent.append(step_s)
        self._evaluated = False
        self.used_s = used_s

    def evaluated(self) -> None:
        """The model was evaluated after the last step that was read: the time of the next one
        includes it."""
        self._evaluated = True

    @property
    def share(self) -> float:
        """The progress of the schedule, 0 to 1: the part of the limit that is used, without this
        start's first steps, whose compilation would end the warm-up."""
        left_s = self.limit_s - self._first_s
        return min(1.0, (self.used_s - self._first_s) / left_s) if left_s > 0 else 1.0

    def is_last(self, evaluates: bool) -> bool:
        """Whether the next step is the last: after it, and after its evaluation if it `evaluates`,
        there is no time for another one. The last step is evaluated in any case."""
        needed_s = (2 + self._lag) * self._step_s() + evaluates * self._evaluation_s
        return self.used_s + needed_s > self.limit_s

    def _step_s(self) -> float:
        return statistics.median(self._recent) if self._recent else 0.0

    def total(self, step: int) -> int:
        """The steps of the schedule at `step` (0-based): as planned, or as many as the time allows
        at the pace so far if those are fewer. Steps remain steps, since milestones count them."""
        share = self.share
        if share * self.planned <= step:
            return self.planned
        return max(step + 1, round(step / share))


def begin(
    limit_s: float, planned: int, manifest: ManifestRecord | None, metrics: Path, world: World
) -> TimeLimit | None:
    """None without a limit. `planned`: as in TimeLimit; `manifest`: of the loaded checkpoint; None:
    the run begins, maybe again. A collective: the value of rank 0 counts."""
    if not limit_s:
        return None
    used = torch.zeros((), dtype=torch.float64, device=world.device)
    if world.rank == 0:
        saved_s = float(manifest.get("used_s", 0.0)) if manifest else 0.0
        used.fill_(max(saved_s, _recorded_s(metrics)))
    if world.world_size > 1:
        dist.broadcast(used, 0)
    return TimeLimit(limit_s, planned, float(used), lag=int(world.device.type == "cuda"))


def _recorded_s(metrics: Path) -> float:
    """The time used up to the last recorded step, which may be later than the last checkpoint. It
    never decreases, so the end of the file is enough: the other ranks wait meanwhile."""
    found = (record.get(USED) for record in backwards(metrics))
    return next((float(s) for s in found if isinstance(s, (int, float))), 0.0)
