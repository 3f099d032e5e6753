"""End of a chart's scale, where values far above it would flatten all others; None: no such
values."""

from __future__ import annotations

from collections.abc import Sequence

from training.monitor.report.chart_types import Series
from training.monitor.report.curve import Curve

CALM_FROM = 5  # points: of fewer, the largest may be the usual one
SPIKE, ABOVE = 2, 1.15  # times the usual values: what is far above them, and the end of the scale
FAR = 20  # times the lowest run: there a run has diverged, unless it still learns


def of_few(values: Sequence[float]) -> float | None:
    """Above all but a few values."""
    values = sorted(values)
    most = values[int(0.98 * (len(values) - 1))] if values else 0.0
    return 1.4 * most if len(values) >= CALM_FROM and values[-1] > 2.5 * most > 0 else None


def of_spikes(curve: Curve) -> float | None:
    """Above the running median of a loss."""
    usual = max((value for _, value in curve.smoothed()), default=0.0)
    return _above(usual, curve.extent[1] if curve.extent else 0.0)


def of_runs(series: Sequence[Series]) -> float | None:
    """Above the runs that do not diverge; lower values are better."""
    curves = [[value for _, value in one.points] for one in series if one.points]
    if len(curves) < 2:
        return None
    most = [max(curve) for curve in curves]
    # A run from scratch starts far above one that is fine-tuned.
    calm = [max(curve) for curve in curves if _is_calm(curve, FAR * min(most))]
    usual = max([min(most), *calm])
    near = [one for one in most if one <= SPIKE * usual]
    return _above(max(near, default=usual), max(most))


def _is_calm(curve: Sequence[float], far: float) -> bool:
    """Without a rise. A run that diverges before its first evaluation has none either."""
    first, last, most = curve[0], curve[-1], max(curve)
    return most <= SPIKE * first and (last <= first / SPIKE or (last <= first and most <= far))


def _above(usual: float, most: float) -> float | None:
    return ABOVE * usual if most > SPIKE * usual > 0 else None
