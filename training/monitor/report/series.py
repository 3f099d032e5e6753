"""metrics.jsonl as curves: every step of a short run, the extremes of equal ranges of a long one,
and all non-finite values.

The file is read from its end, some megabytes at a time: a resumed run repeats steps, and later
records replace earlier ones.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from operator import itemgetter, sub
from pathlib import Path

from training.core import metric_units
from training.core.jsonl import Record, number, whole
from training.core.last_resume import LastResume
from training.core.read_backwards import backwards, count_lines
from training.monitor import launches
from training.monitor.launches import SetBack, clock
from training.monitor.report.curve import (
    Curve,
    PointPosition,
    add_stretch,
    in_order,
    not_finite_name,
    without_pauses,
)

POINTS = 1500  # of a curve, at most
MARKS = 200  # NaN or infinite values that a curve shows, at most
# keys that are not curves; the last ones count tokens or samples so far
AXES = (
    "time",
    "step",
    "epoch",
    *metric_units.COUNTED,
)

MEDIANS = ("step_ms", "joules_per_unit")


class Metrics:
    """Content of a metrics.jsonl, or of `records` in its place. `curves`: key → curve; `by_rank`:
    key → one curve for each rank. `begun`: start of the run, unix s. `resumed`: the last resume.
    `set_back`: launches after the clock was set back."""

    def __init__(
        self,
        path: Path,
        begun: float | None = None,
        points: int = POINTS,
        records: Sequence[Record] | None = None,
        resumed: LastResume | None = None,
        set_back: Sequence[SetBack] = (),
    ) -> None:
        self.curves: dict[str, Curve] = {}
        self.by_rank: dict[str, list[Curve]] = {}
        self.evaluations: dict[int, Record] = {}
        self.steps = 0  # in the file
        self.last: Record = {}
        self.first: Record = {}
        # the largest backward jump of the clock
        self.back_s = max((one.by_s for one in set_back), default=0.0)
        self._next: list[Record] = []  # first record of the range that was read before
        self._counted: dict[int, int] = {}  # step → tokens or samples so far
        self._losses = 0
        self._first_losses = deque[float](maxlen=metric_units.ENDS_MOST)
        self._last_losses: list[float] = []
        self._values: dict[str, array[float]] = {}  # of every step, from the last to the first
        self._begun, self._own_steps = resumed.step if resumed else 0, 0  # of the last start
        self.lines = count_lines(path) if records is None else len(records)
        self.resumed = resumed
        found = launches.later(
            backwards(path) if records is None else reversed(records), list(set_back)
        )
        self._read((r for r in found if not self._is_discarded(r)), max(2, points) // 2)
        self._order(begun)
        self._pauses: list[tuple[float, float]] = []

    def _is_discarded(self, record: Record) -> bool:
        return self.resumed is not None and self.resumed.discards(record)

    def _read(self, records: Iterable[Record], stretches: int) -> None:
        """`records`: from last to first."""
        self.stretch = 1 if self.lines <= 2 * stretches else -(-self.lines // stretches)
        group: list[Record] = []
        lowest: int | None = None
        for record in records:
            step = whole(record.get("step"))
            if step is None:
                continue
            if "loss" not in record and any(
                key.startswith(metric_units.EVALUATION) for key in record
            ):
                if (lowest is None or step < lowest) and step not in self.evaluations:
                    self.evaluations[step] = record
                continue
            if lowest is not None and step >= lowest:  # replaced by a later record
                continue
            lowest = step
            self.last = self.last or record
            self.first = record
            if step in self.evaluations:
                self._note_counted(record)
            group.append(record)
            if len(group) == self.stretch:
                self._keep(group)
                group = []
        self._keep(group)

    def _keep(self, group: list[Record]) -> None:
        """Adds one range of records to the curves."""
        if not group:
            return
        group.reverse()
        self._keep_values(group)
        self.steps += len(group)
        times = [clock(record) for record in (*group, *self._next)]
        self.back_s = max(self.back_s, *map(sub, times, times[1:]), 0.0)
        self._next = group[:1]
        self._note_counted(group[0])
        self._note_counted(group[-1])
        for key in {*chain.from_iterable(group)}.difference(
            AXES, [metric_units.counted(self.last)]
        ):
            values = [record.get(key) for record in group]
            if list in set(map(type, values)):
                columns = list(
                    zip_longest(*(value if isinstance(value, list) else () for value in values))
                )
                curves = self.by_rank.setdefault(key, [])
                curves += [Curve() for _ in columns[len(curves) :]]
                for curve, column in zip(curves, columns, strict=False):
                    add_stretch(curve, group, list(column))
                continue
            if key == "loss":
                self._keep_ends([v for value in values if (v := number(value)) is not None])
            add_stretch(self.curves.setdefault(key, Curve()), group, values)

    def _keep_values(self, group: Sequence[Record]) -> None:
        """Adds the values whose medians are shown; NaN is an unknown one."""
        self._own_steps += sum(record["step"] > self._begun for record in group)
        keys = {*chain.from_iterable(group)}
        shown = {key for key in keys if key in MEDIANS or key.endswith(metric_units.PER_S)}
        for key in shown | self._values.keys():
            column = self._values.setdefault(key, array("d", [math.nan]) * self.steps)
            values = (number(record.get(key)) for record in reversed(group))
            column.extend(math.nan if value is None else value for value in values)

    def _note_counted(self, record: Record) -> None:
        if (counted := metric_units.so_far(record)) is not None:
            self._counted[record["step"]] = counted

    def _keep_ends(self, losses: list[float]) -> None:
        """Adds the losses of one range, from the last range to the first."""
        self._losses += len(losses)
        self._first_losses.extendleft(reversed(losses))
        if (missing := metric_units.ENDS_MOST - len(self._last_losses)) > 0:
            self._last_losses = losses[-missing:] + self._last_losses

    def _order(self, begun: float | None) -> None:
        """Sorts everything by step, with times relative to the start of the run."""
        for name in [
            name for name, curve in self.curves.items() if not curve.points and not curve.bad
        ]:
            del self.curves[name]
        self.by_rank = {
            n: curves for n, curves in self.by_rank.items() if any(c.points for c in curves)
        }
        self.evaluations = dict(sorted(self.evaluations.items()))
        first = clock(self.first)
        self.origin = begun if begun is not None and (not first or begun <= first) else first
        for curve in [*self.curves.values(), *chain.from_iterable(self.by_rank.values())]:
            curve.points, curve.means = (
                in_order(curve.points, self.origin),
                in_order(curve.means, self.origin),
            )
            curve.marks = in_order(curve.marks, self.origin)[:MARKS]

    def median(self, key: str) -> float | None:
        """Median of a speed or of one of MEDIANS, as in summary.json: over the steps of the last
        start but its first, which includes warm-up, or over all."""
        column = self._values.get(key, array("d"))
        part = column[: max(0, self._own_steps - 1)] or column[:-1] or column
        known = list(filter(math.isfinite, part))
        return statistics.median(known) if known else None

    def ends(self) -> tuple[float, float] | None:
        """The first and last loss, as in summary.json: means of steps, whatever the curve keeps,
        non-finite if one of the steps is."""
        if not self._losses:
            return None
        some = metric_units.at_end(self._losses)
        return sum(list(self._first_losses)[:some]) / some, sum(self._last_losses[-some:]) / some

    def so_far(self, step: int) -> int | None:
        """Tokens or samples until this step: as recorded, else by the steps around it, since a
        resume may change the batch."""
        if step in self._counted or not self._counted:
            return self._counted.get(step)
        known = sorted({0: 0, **self._counted}.items())
        if len(known) == 1:
            return known[0][1]
        after = min(max(1, bisect_right(known, step, key=itemgetter(0))), len(known) - 1)
        (least, fewest), (most, many) = known[after - 1 : after + 1]
        return max(0, fewest + (many - fewest) * (step - least) // (most - least))

    @property
    def times(self) -> list[float]:
        """Times of all steps and evaluations, unix s."""
        curves = self.curves.values()
        trained = {
            self.origin + place.time_s
            for curve in curves
            for place, _ in chain(curve.points, curve.marks)
        }
        return sorted(
            trained | {at for record in self.evaluations.values() if (at := clock(record))}
        )

    def leave_out(self, pauses: list[tuple[float, float]]) -> None:
        """Removes these pauses, (from, to) in unix s, from the times of all curves."""
        self._pauses = [(since - self.origin, until - self.origin) for since, until in pauses]
        for curve in [*self.curves.values(), *chain.from_iterable(self.by_rank.values())]:
            self._without_pauses(curve)

    def discard(self, steps: Iterable[int]) -> None:
        """Removes the evaluations of these steps."""
        for step in steps:
            self.evaluations.pop(step, None)

    def _without_pauses(self, curve: Curve) -> None:
        if self._pauses:
            curve.points, curve.means = (
                without_pauses(curve.points, self._pauses),
                without_pauses(curve.means, self._pauses),
            )
            curve.marks = without_pauses(curve.marks, self._pauses)

    def peak(self, key: str) -> float | None:
        """The largest value of any rank."""
        extents = [curve.extent for curve in self.by_rank.get(key, ())]
        return max((high for _, high in filter(None, extents)), default=None)

    def evaluation(self, key: str) -> Curve:
        """Curve of one metric of the evaluations."""
        curve = Curve()
        for step, record in self.evaluations.items():
            place = PointPosition(step, clock(record), self.so_far(step))
            if (value := number(record.get(key))) is None:
                continue
            if math.isfinite(value):
                curve.points.append((place, value))
            else:
                curve.marks.append((place, not_finite_name(value)))
        curve.bad = len(curve.marks)
        curve.points, curve.marks = (
            in_order(curve.points, self.origin),
            in_order(curve.marks, self.origin)[:MARKS],
        )
        self._without_pauses(curve)
        return curve

    @property
    def scores(self) -> list[str]:
        """Metrics of the evaluations; the one by which runs are compared comes first."""
        return metric_units.scores(key for record in self.evaluations.values() for key in record)

    def best(self, key: str) -> tuple[int, float] | None:
        """(step, value) of the best evaluation."""
        points = self.evaluation(key).points
        if not points:
            return None
        place, value = (max if metric_units.higher_is_better(key) else min)(
            points, key=lambda point: point[1]
        )
        return place.step, value
