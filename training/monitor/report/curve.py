"""One curve of a report: its points, marks, smoothing and times."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from training.core import metric_units, units
from training.core.jsonl import Record, number
from training.monitor.launches import clock, left_over

SMOOTH_FROM = 20  # points
SMOOTH_SHARE = 40  # a curve is smoothed over this part of its length


@dataclass(frozen=True)
class PointPosition:
    """Position of a point. `time_s`: since the start of the run; `tokens`: so far, or samples."""

    step: int
    time_s: float
    tokens: int | None


@dataclass
class Curve:
    """`points`: extremes of each range, by step. `means`: mean of each range. `marks`: positions
    with a NaN or infinite value; `bad`: number of such values."""

    points: list[tuple[PointPosition, float]] = field(default_factory=list)
    means: list[tuple[PointPosition, float]] = field(default_factory=list)
    marks: list[tuple[PointPosition, str]] = field(default_factory=list)
    bad: int = 0

    def smoothed(self, *, ends: bool = True) -> list[tuple[PointPosition, float]]:
        """Running median; empty if there are too few points. `ends`: the window shrinks towards
        both ends, so that the curve starts and ends at its values; otherwise outliers at the ends,
        such as a first step that compiles, disappear."""
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
        """Window of `smoothed`, in ranges; 0: too few points."""
        return 0 if len(self.means) < SMOOTH_FROM else max(5, len(self.means) // SMOOTH_SHARE) | 1

    @property
    def extent(self) -> tuple[float, float] | None:
        values = [value for _, value in self.points]
        return (min(values), max(values)) if values else None


def not_finite_name(value: float) -> str:
    return "NaN" if math.isnan(value) else "+∞" if value > 0 else "−∞"


def score_text(value: float | None, form: str = "") -> str:
    """A loss or score as a figure; a non-finite one has the name that charts give it."""
    if value is None or math.isfinite(value):
        return units.decimal(value, form)
    return not_finite_name(value)


def add_stretch(curve: Curve, group: list[Record], values: list[Any]) -> None:
    """Adds one range of steps: its smallest and largest value, its mean, and its first value that
    is NaN or infinite."""
    try:
        total = sum(values)
        plain = math.isfinite(total)
    except (TypeError, OverflowError):  # None, text, a list, a huge integer
        plain = False
    if not plain:
        pairs = [
            (record, value)
            for record, value in zip(group, values, strict=True)
            if number(value) is not None
        ]
        bad = [
            (_place(record), not_finite_name(value))
            for record, value in pairs
            if not math.isfinite(value)
        ]
        curve.bad += len(bad)
        curve.marks += bad[:1]
        pairs = [(record, value) for record, value in pairs if math.isfinite(value)]
        if not pairs:
            return
        group, values = [record for record, _ in pairs], [value for _, value in pairs]
        total = math.inf
    # the sum of values near 1e308 is not finite
    mean = total / len(group) if math.isfinite(total) else math.fsum(v / len(group) for v in values)
    least, most = values.index(min(values)), values.index(max(values))
    curve.points += [(_place(group[i]), values[i]) for i in sorted({least, most}, reverse=True)]
    curve.means.append((_place(group[len(group) // 2]), mean))


def _place(record: Record) -> PointPosition:
    return PointPosition(record["step"], clock(record), metric_units.so_far(record))


def in_order(
    points: list[tuple[PointPosition, Any]], origin: float
) -> list[tuple[PointPosition, Any]]:
    """Points by step, with times relative to `origin` that never decrease."""
    out, latest = [], 0.0
    for place, value in sorted(points, key=lambda point: point[0].step):
        latest = max(latest, place.time_s - origin)
        out.append((PointPosition(place.step, round(latest, 3), place.tokens), value))
    return out


def without_pauses(
    points: list[tuple[PointPosition, Any]], pauses: list[tuple[float, float]]
) -> list[tuple[PointPosition, Any]]:
    return [
        (replace(place, time_s=round(left_over(place.time_s, pauses), 3)), value)
        for place, value in points
    ]
