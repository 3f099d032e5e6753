"""The course of a training, from any source: how many steps count, how many points a curve keeps,
and their order statistics."""

from __future__ import annotations

import math

SPEED_STEPS = 100  # step time and speed are those of so many last steps
RATE_STEPS = 1000  # the time left follows from so many, evaluations and checkpoints among them
CURVE_POINTS = 4096


def median(values: list[float]) -> float | None:
    """Of sorted values."""
    middle = len(values) // 2
    return (
        None
        if not values
        else values[middle]
        if len(values) % 2
        else (values[middle - 1] + values[middle]) / 2
    )


def percentile(values: list[float], percent: int) -> float | None:
    """Of sorted values: the smallest that `percent` of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else None


def thin(values: list[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """At most `points` (last step, mean) over equal stretches of steps; NaN where any value of a
    stretch is."""
    if len(values) <= points:
        return values
    first, span = values[0][0], values[-1][0] - values[0][0] + 1
    out: list[tuple[int, float]] = []
    group: list[float] = []
    for i, (step, value) in enumerate(values):
        group.append(value)
        following = values[i + 1][0] if i + 1 < len(values) else first + span
        if (following - first) * points // span != (step - first) * points // span:
            mean = sum(group) / len(group)
            out.append((step, mean if math.isfinite(mean) else math.nan))
            group = []
    return out
