"""metrics.jsonl as curves: every step of a short run, of a long one the extremes of equal
stretches, and whatever is no number.

The file is read from its end, some megabytes at a time: a resumed run repeats steps, and what comes
later in the file wins.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from operator import sub
from pathlib import Path

from training.core import metric_units
from training.core.jsonl import Record, number, whole
from training.monitor.report.curve import (
    Curve,
    PointPosition,
    add_stretch,
    clock,
    in_order,
    not_finite_name,
    without_pauses,
)
from training.monitor.report.read_backwards import backwards, count_lines

POINTS = 1500  # of a curve, at most
MARKS = 200  # places without a number that a curve shows
# and how many were counted so far, by whatever name
AXES = (
    "time",
    "step",
    "epoch",
    *metric_units.COUNTED,
)


class Metrics:
    """What a metrics.jsonl tells, or `told` in its place. `curves`: key → curve; `by_rank`: key →
    one curve for each rank."""

    def __init__(
        self,
        path: Path,
        begun: float | None = None,
        points: int = POINTS,
        told: Sequence[Record] | None = None,
    ) -> None:
        self.curves: dict[str, Curve] = {}
        self.by_rank: dict[str, list[Curve]] = {}
        self.evaluations: dict[int, Record] = {}
        self.steps = self.repeated = 0  # trained, in the file, of them overtaken by later ones
        self.last: Record = {}
        self.first: Record = {}
        self.back_s = 0.0  # the largest jump of the clock into the past
        self._next: list[Record] = []  # the first record of the stretch that was read before
        self._values = defaultdict[str, "array[float]"](lambda: array("d"))
        self.lines = count_lines(path) if told is None else len(told)
        self._read(backwards(path) if told is None else reversed(told), max(2, points) // 2)
        self._order(begun)
        self._pauses: list[tuple[float, float]] = []
        # the first step pays for warm-up (see training.trainer.finish)
        for (
            key,
            known,
        ) in self._values.items():
            value = self.first.get(key)
            if len(known) > 1 and isinstance(value, float) and value in known:
                known.remove(value)

    def _read(self, records: Iterable[Record], stretches: int) -> None:
        """`records`: from the last to the first."""
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
            if lowest is not None and step >= lowest:
                self.repeated += 1
                continue
            lowest = step
            self.last = self.last or record
            self.first = record
            group.append(record)
            if len(group) == self.stretch:
                self._keep(group)
                group = []
        self._keep(group)

    def _keep(self, group: list[Record]) -> None:
        """The extremes of one stretch, later than all that follow."""
        if not group:
            return
        group.reverse()
        self.steps += len(group)
        times = [clock(record) for record in (*group, *self._next)]
        self.back_s = max(self.back_s, *map(sub, times, times[1:]), 0.0)
        self._next = group[:1]
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
            if key == "step_ms" or key.endswith(metric_units.PER_S):
                self._values[key].extend(
                    v for v in values if isinstance(v, float) and math.isfinite(v)
                )
            add_stretch(self.curves.setdefault(key, Curve()), group, values)

    def _order(self, begun: float | None) -> None:
        """Everything was read from the end; and times count from the start of the run, never
        backwards."""
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
        """Over all steps but the first, of a speed or of step_ms: the same as in summary.json."""
        return statistics.median(self._values[key]) if self._values.get(key) else None

    @property
    def times(self) -> list[float]:
        """When something was trained or evaluated, unix s."""
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
        """(from, to), unix s: no curve counts these as time."""
        self._pauses = [(since - self.origin, until - self.origin) for since, until in pauses]
        for curve in [*self.curves.values(), *chain.from_iterable(self.by_rank.values())]:
            self._without_pauses(curve)

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
        """One figure of the evaluations."""
        curve, tokens, steps = (
            Curve(),
            metric_units.so_far(self.last),
            whole(self.last.get("step")) or 0,
        )
        for step, record in self.evaluations.items():
            # every step has as many
            seen = tokens * step // steps if tokens is not None and steps else None
            place = PointPosition(step, clock(record), seen)
            if (value := number(record.get(key))) is None:
                continue
            if math.isfinite(value):
                curve.points.append((place, value))
            else:
                curve.marks.append((place, not_finite_name(value)))
        curve.bad = len(curve.marks)
        curve.points, curve.marks = (
            in_order(curve.points, self.origin),
            in_order(curve.marks, self.origin),
        )
        self._without_pauses(curve)
        return curve

    @property
    def scores(self) -> list[str]:
        """Figures of the evaluations, the one that runs are compared by first."""
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
