"""What the summary of a run and a model card need of metrics.jsonl: a few numbers of each step, in
arrays, since a run may have millions of steps."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left, bisect_right
from itertools import compress
from typing import TYPE_CHECKING

from training.core import evaluations, rundir

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures

LOSS, MEMORY = "loss", "memory_bytes"


class RecordedSteps:
    """All parts of a resumed run up to the step `last`, without what a resume has discarded.
    `names`: of further numbers of a step; one that is unknown is NaN."""

    def __init__(self, run: rundir.RunDir, last: int, names: tuple[str, ...]) -> None:
        self.evaluations: dict[int, Figures] = {}  # by step
        self.last: Figures | None = None  # record of the newest step
        self._names = names
        self._steps, self._computed = array("q"), array("b")  # has the step a loss?
        self._columns = {name: array("d") for name in (LOSS, MEMORY, *names)}
        discarded = evaluations.discarded(run.events)
        for record in rundir.read_records(run.metrics):
            if record["step"] > last:
                continue
            if LOSS in record:
                self._add(record)
            elif record["step"] not in discarded:
                self.evaluations[record["step"]] = record

    def _add(self, step: Figures) -> None:
        at = bisect_left(self._steps, step["step"])
        if at < len(self._steps):  # the part from there on was discarded by a resume
            del self._steps[at:], self._computed[at:]
            for column in self._columns.values():
                del column[at:]
        self.last = step
        self._steps.append(step["step"])
        self._computed.append(step[LOSS] is not None)
        memory = (used for used in step.get(MEMORY, ()) if used is not None)
        self._columns[MEMORY].append(max(memory, default=math.nan))
        for name in (LOSS, *self._names):
            value = step.get(name)
            self._columns[name].append(math.nan if value is None else value)

    @property
    def steps(self) -> list[int]:
        """Those of `losses`."""
        return list(compress(self._steps, self._computed))

    @property
    def losses(self) -> list[float]:
        """Without those of steps that fp16 has skipped."""
        return list(compress(self._columns[LOSS], self._computed))

    def most_memory(self, after: int) -> int | None:
        """Of any rank in the steps after this one, or in all if none is later; in bytes."""
        column = self._columns[MEMORY]
        known = _known(column[bisect_right(self._steps, after) :] or column)
        return int(max(known)) if known else None

    def median(self, name: str, after: int) -> float | None:
        """Over the steps after this one without the first, which includes warm-up; over all if no
        other is later. None: unknown."""
        column = self._columns[name]
        own = column[bisect_right(self._steps, after) :]
        known = _known(own[1:] or column[1:] or column)
        return statistics.median(known) if known else None


def _known(column: array[float]) -> list[float]:
    return [value for value in column if not math.isnan(value)]
