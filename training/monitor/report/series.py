"""metrics.jsonl as curves: every step of a short run, of a long one the extremes of equal
stretches, and whatever is no number.

The file is read from its end, some megabytes at a time: a resumed run repeats steps, and what comes
later in the file wins.
"""

from __future__ import annotations

import json
import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from operator import sub
from pathlib import Path
from typing import Any

from training.core import metric_units
from training.core.jsonl import Record, number, parse, whole

POINTS = 1500  # of a curve, at most
BLOCK = 1 << 22  # bytes
LINES = 256  # that are parsed together
MARKS = 200  # places without a number that a curve shows
# and how many were counted so far, by whatever name
AXES = (
    "time",
    "step",
    "epoch",
    *metric_units.COUNTED,
)
SMOOTH_FROM = 20  # points
SMOOTH_SHARE = 40  # a curve is smoothed over this part of its length


@dataclass(frozen=True)
class PointPosition:
    """Where a point stands: `time_s` since the start of the run, as far as the clocks tell;
    `tokens` so far, or samples."""

    step: int
    time_s: float
    tokens: int | None


@dataclass
class Curve:
    """`points` in the order of steps; `marks`: places whose value is NaN or infinite, `bad` of them
    in all."""

    points: list[tuple[PointPosition, float]] = field(default_factory=list)
    means: list[tuple[PointPosition, float]] = field(default_factory=list)  # of each stretch
    marks: list[tuple[PointPosition, str]] = field(default_factory=list)
    bad: int = 0

    def smoothed(self, *, ends: bool = True) -> list[tuple[PointPosition, float]]:
        """The running median. `ends`: it shrinks towards both, so that it begins and ends where the
        values do; else what is unlike the rest there (a first step that compiles) does not show.
        Empty where there is too little to smooth."""
        half = self.window // 2
        if not half:
            return []
        last = len(self.means) - 1
        out = []
        for i, (place, _) in enumerate(self.means):
            reach = min(half, i, last - i) if ends else half
            out.append(
                (
                    place,
                    statistics.median(
                        value for _, value in self.means[max(0, i - reach) : i + reach + 1]
                    ),
                )
            )
        return out

    @property
    def window(self) -> int:
        """Of `smoothed`, in stretches."""
        return 0 if len(self.means) < SMOOTH_FROM else max(5, len(self.means) // SMOOTH_SHARE) | 1

    @property
    def extent(self) -> tuple[float, float] | None:
        values = [value for _, value in self.points]
        return (min(values), max(values)) if values else None


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
                    _add(curve, group, list(column))
                continue
            if key == "step_ms" or key.endswith(metric_units.PER_S):
                self._values[key].extend(
                    v for v in values if isinstance(v, float) and math.isfinite(v)
                )
            _add(self.curves.setdefault(key, Curve()), group, values)

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
                _since(curve.points, self.origin),
                _since(curve.means, self.origin),
            )
            curve.marks = _since(curve.marks, self.origin)[:MARKS]

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
                _shorter(curve.points, self._pauses),
                _shorter(curve.means, self._pauses),
            )
            curve.marks = _shorter(curve.marks, self._pauses)

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
                curve.marks.append((place, _name(value)))
        curve.bad = len(curve.marks)
        curve.points, curve.marks = (
            _since(curve.points, self.origin),
            _since(curve.marks, self.origin),
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


def clock(record: Record) -> float:
    """When it was written, unix s; 0 where that is not known."""
    at = number(record.get("time"))
    return at if at is not None and math.isfinite(at) else 0.0


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "+∞" if value > 0 else "−∞"


def _add(curve: Curve, group: list[Record], values: list[Any]) -> None:
    """The smallest and the largest value of a stretch, and the first that is no number."""
    try:
        total = sum(values)
        plain = math.isfinite(total)
    except (TypeError, OverflowError):  # None, text, a list, a number beyond all bounds
        plain = False
    if not plain:
        pairs = [
            (record, value)
            for record, value in zip(group, values, strict=True)
            if number(value) is not None
        ]
        bad = [
            (_place(record), _name(value)) for record, value in pairs if not math.isfinite(value)
        ]
        curve.bad += len(bad)
        curve.marks += bad[:1]
        pairs = [(record, value) for record, value in pairs if math.isfinite(value)]
        if not pairs:
            return
        group, values = [record for record, _ in pairs], [value for _, value in pairs]
        total = math.fsum(values)
    least, most = values.index(min(values)), values.index(max(values))
    curve.points += [(_place(group[i]), values[i]) for i in sorted({least, most}, reverse=True)]
    curve.means.append((_place(group[len(group) // 2]), total / len(group)))


def _place(record: Record) -> PointPosition:
    return PointPosition(record["step"], clock(record), metric_units.so_far(record))


def _since(
    points: list[tuple[PointPosition, Any]], origin: float
) -> list[tuple[PointPosition, Any]]:
    """In the order of steps, with times that count from `origin` and never go back."""
    out, latest = [], 0.0
    for place, value in sorted(points, key=lambda point: point[0].step):
        latest = max(latest, place.time_s - origin)
        out.append((PointPosition(place.step, round(latest, 3), place.tokens), value))
    return out


def left_over(at: float, pauses: list[tuple[float, float]]) -> float:
    """A time without what of the pauses lies before it."""
    return at - sum(min(at, until) - since for since, until in pauses if at > since)


def _shorter(
    points: list[tuple[PointPosition, Any]], pauses: list[tuple[float, float]]
) -> list[tuple[PointPosition, Any]]:
    return [
        (replace(place, time_s=round(left_over(place.time_s, pauses), 3)), value)
        for place, value in points
    ]


def count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except OSError:
        return 0


def backwards(path: Path) -> Iterator[Record]:
    """Records from the last to the first; what is no whole record (a crash, a write under way) is
    left out."""
    for lines in _blocks(path):
        for end in range(len(lines), 0, -LINES):
            some = lines[max(0, end - LINES) : end]
            yield from reversed(_parsed(some))


def _blocks(path: Path) -> Iterator[list[bytes]]:
    """The lines of each block, the last block first."""
    try:
        with path.open("rb") as file:
            place, rest = file.seek(0, 2), b""
            while place > 0:
                size = min(BLOCK, place)
                place -= size
                file.seek(place)
                text = file.read(size) + rest
                cut = text.find(b"\n") + 1 if place else 0
                # the line has begun earlier; one without an end is no record
                if place and (not cut or len(text) > 4 * BLOCK):
                    rest = text if len(text) <= 4 * BLOCK else b""
                    continue
                rest = text[:cut]
                yield text[cut:].split(b"\n")
    except OSError:
        return


def _parsed(lines: list[bytes]) -> list[Record]:
    """Together, which is faster; one by one where something is wrong with one of them."""
    lines = [line for line in lines if line]
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        records = []
    if len(records) == len(lines) and all(isinstance(record, dict) for record in records):
        return list(records)
    return [record for line in lines if (record := parse(line)) is not None]
