"""Window sizes, order statistics and downsampling for the curves of a training."""

from __future__ import annotations

import math

SPEED_STEPS = 100  # last steps that step time and speed are computed from
RATE_STEPS = 1000  # last steps that the ETA is computed from, with evaluations and checkpoints
CURVE_POINTS = 4096


def median(values: list[float]) -> float | None:
    """The median of sorted values."""
    middle = len(values) // 2
    return (
        None
        if not values
        else values[middle]
        if len(values) % 2
        else (values[middle - 1] + values[middle]) / 2
    )


def percentile(values: list[float], percent: int) -> float | None:
    """The smallest of sorted values that `percent` of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else None


def thin(values: list[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """At most `points` pairs (last step, mean) over equal ranges of steps; NaN where a range
    contains a NaN or infinite value."""
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
