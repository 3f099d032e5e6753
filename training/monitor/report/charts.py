"""Vega-Lite specifications of charts, rendered as a picture and drawn interactively by the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training.core import units
from training.core.messages import msg
from training.monitor.report import scale_top
from training.monitor.report.chart_types import (
    COLOURS,
    CONFIG,
    DOTS,
    HALF,
    LINE,
    LOW,
    SCHEMA,
    TALL,
    THIN,
    WIDE,
    Chart,
    Series,
    VegaSpec,
    colour,
    dash,
    joined,
)
from training.monitor.report.curve import Curve, PointPosition
from training.monitor.report.series import POINTS

NO_NUMBER = -1  # number in place of a series: marks without a value that belong to the whole chart
# minus the number of the series: marks of one series, which are hidden with it
MARK, BEYOND = (
    -1000,
    -2000,
)
HALF_POINTS = 750  # of a curve in a chart of half the width
EQUAL_SHARE = 0.02  # of the value: extent of the axis around it if all values are equal
EDGE = 5  # pixels
# Values beyond these, of a diverged or vanished gradient, have exponents instead of many zeros.
SHORTEST, LONGEST, EXPONENT = 1e-4, 1e12, "~e"
PLAIN_ZERO = "datum.value === 0 ? '0' : datum.label"  # "0" instead of "0k"
# No label between two steps, which would be that of a step, too. Other axes have PLAIN_ZERO.
OF_STEP = f"datum.value % 1 ? '' : {PLAIN_ZERO}"


def lines(
    id: str,
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    note: str = "",
    marks: Sequence[tuple[PointPosition, str]] = (),
    form: str = "",
    wide: bool = False,
    log: bool = False,
    zero: bool = False,
    calm: bool = False,
    top: float | None = None,
    named: bool = True,
) -> Chart | None:
    """Curves over steps; None without a point. `marks`: steps without a finite value, and what they
    have instead. `calm`: a few values far above the others are marked at the upper edge, so that
    the others remain readable. `top`: end of the scale, if known."""
    series = [
        replace(s, points=thin(s.points, POINTS if wide else HALF_POINTS))
        for s in series
        if s.points or s.marks
    ]
    if not series and not marks:
        return None
    rows: list[tuple[int, int, float, int | None, float | None]] = []
    for number, one in enumerate(series):
        without = [*marks] if one.style == THIN or len(series) == 1 else []
        without += one.marks if one.style == DOTS else []
        gaps = [(place, None) for place, _ in without]
        points: list[tuple[PointPosition, float | None]] = (
            sorted([*one.points, *gaps], key=lambda p: p[0].step) if gaps else list(one.points)
        )
        rows += [(number, place.step, place.time_s, place.tokens, value) for place, value in points]
    rows += [(NO_NUMBER, place.step, place.time_s, place.tokens, None) for place, _ in marks]
    values = [value for one in series for _, value in one.points]
    top = scale_top.of_few(values) if calm else top
    own: dict[int, tuple[str, int]] = {}  # number of a series' marks → shape, colour
    for number, one in enumerate(series):
        beyond = [place for place, value in one.points if top is not None and value > top]
        for kind, shape, places in (
            (MARK, "cross", [place for place, _ in one.marks]),
            (BEYOND, "triangle-up", beyond),
        ):
            rows += [
                (kind - number, place.step, place.time_s, place.tokens, None) for place in places
            ]
            own |= {kind - number: (shape, one.colour)} if places else {}
    keys = ("series", "step", "time", "tokens", "y")
    columns = {key: list(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)}
    names = [one.name for one in series]
    step_form = "~s" if max(columns["step"]) >= 10_000 else ",d"
    at = {
        "title": msg("monitor.report.axis.step"),
        "format": step_form,
        "tickMinStep": 1,
        "labelExpr": OF_STEP,
    }
    x: VegaSpec = {
        "field": "step",
        "type": "quantitative",
        "axis": at,
        "scale": {"nice": False, "zero": False},
    }
    dots = any(one.style == DOTS for one in series)  # a dot at the edge must be whole
    y = {
        "field": "y",
        "type": "quantitative",
        "axis": _value_axis(values, top, form),
        "scale": _value_scale(values, top, zero, dots),
    }
    paint: VegaSpec = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": list(range(len(series))), "range": [colour(s.colour) for s in series]},
        "legend": None,
    }
    encoding: VegaSpec = {"x": x, "y": y, "color": paint}
    if any(one.colour > COLOURS for one in series):
        encoding["strokeDash"] = {
            **paint,
            "scale": {**paint["scale"], "range": [dash(s.colour) for s in series]},
        }
    layers: list[VegaSpec] = []
    for style in (THIN, LINE, DOTS):
        members = [i for i, one in enumerate(series) if one.style == style]
        if not members:
            continue
        mark: VegaSpec = {
            "type": "line",
            "strokeJoin": "round",
            "invalid": "break-paths-show-domains",
            "clip": True,
        }
        mark |= {"strokeWidth": 1, "strokeOpacity": 0.38} if style == THIN else {"strokeWidth": 1.8}
        if style == DOTS or max(len(series[i].points) for i in members) <= 1:
            mark["point"] = {"size": 28, "filled": True, "opacity": 1}
        layers.append(
            {"transform": [{"filter": _one_of(members)}], "mark": mark, "encoding": encoding}
        )
    edge = [(number, shape, colour(which)) for number, (shape, which) in own.items()]
    for number, shape, which in [*([(NO_NUMBER, "cross", "var(--bad)")] if marks else []), *edge]:
        mark = {
            "type": "point",
            "shape": shape,
            "size": 55,
            "filled": True,
            "opacity": 1,
            "clip": True,
            "color": which,
        }
        mark |= {"angle": 45} if shape == "cross" else {}
        layers.append(
            {
                "transform": [{"filter": _one_of([number])}],
                "mark": mark,
                "encoding": {"x": x, "y": {"value": 6}},
            }
        )
    if marks or own or dots:
        # keeps a mark or point at the last step whole
        x["scale"] = {
            "nice": False,
            "zero": False,
            "padding": EDGE,
        }
    if values:  # an empty chart cannot be zoomed
        layers[0]["params"] = [zoom()]
    if top is not None and any(shape == "triangle-up" for shape, _ in own.values()):
        note = joined([note, msg("monitor.report.charts.above", top=units.significant(top))])
    return Chart(
        id,
        title,
        unit,
        note,
        {
            "$schema": SCHEMA,
            "config": CONFIG,
            "width": WIDE if wide else HALF,
            "height": TALL if wide else LOW,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "params": [{"name": "hidden", "value": []}],
            "transform": [{"filter": "indexof(hidden, datum.series) < 0"}],
            "layer": layers,
        },
        columns,
        [(name, one.colour) for name, one in zip(names, series, strict=True)],
        wide,
        log and any(value > 0 for value in values),
        named,
        tuple(i for i, one in enumerate(series) if one.style == THIN),
        hover=True,
    )


def _value_scale(values: Sequence[float], top: float | None, zero: bool, dots: bool) -> VegaSpec:
    # rounding makes all labels equal on an axis of one value
    if values and min(values) == max(values) and not zero:
        around = EQUAL_SHARE * abs(values[0])
        ends = [values[0] - around, values[0] + around] if around else [0, 1]
        return {"domain": ends, "zero": False, "nice": False}
    scale: VegaSpec = {"zero": zero, "nice": top is None}
    scale |= {} if top is None else {"domainMax": top}
    return scale | ({"padding": EDGE} if not zero and (dots or top is not None) else {})


def _value_axis(values: Sequence[float], top: float | None, form: str) -> VegaSpec:
    extent = max((abs(v) for v in values if top is None or v <= top), default=0.0)
    form = form if extent == 0 or SHORTEST <= extent < LONGEST else EXPONENT
    return {
        "title": None,
        **({"format": form} if form else {}),
        **({"labelExpr": PLAIN_ZERO} if form in ("~s", EXPONENT) else {}),
    }


def thin(points: list[tuple[PointPosition, float]], most: int) -> list[tuple[PointPosition, float]]:
    """At most `most` points: the smallest and the largest value of equal ranges."""
    size = -(-len(points) // (most // 2))
    if len(points) <= most:
        return points
    groups = (points[i : i + size] for i in range(0, len(points), size))
    ends = ((min(group, key=_value), max(group, key=_value)) for group in groups)
    return [point for pair in ends for point in sorted({*pair}, key=lambda p: p[0].step)]


def _value(point: tuple[PointPosition, float]) -> float:
    return point[1]


def zoom() -> VegaSpec:
    # The wheel alone scrolls the page, which wide charts would otherwise block.
    return {
        "name": "zoom",
        "bind": "scales",
        "select": {
            "type": "interval",
            "zoom": "wheel![event.ctrlKey || event.metaKey || event.shiftKey]",
        },
    }


def _one_of(numbers: list[int]) -> str:
    return " || ".join(f"datum.series === {number}" for number in numbers)


def raw_and_smooth(name: str, curve: Curve, *, ends: bool = True) -> list[Series]:
    """The raw values, thin, and their running median; one plain curve if there are too few."""
    smooth = curve.smoothed(ends=ends)
    if not smooth:
        return [Series(name, 1, LINE, curve.points)]
    return [
        Series(name, 1, THIN, curve.points),
        Series(msg("monitor.report.charts.smoothed", name=name), 1, LINE, smooth),
    ]


def stacked(
    id: str,
    title: str,
    rows: Sequence[tuple[str, str, float]],
    parts: Sequence[str],
    *,
    unit: str,
    note: str,
) -> Chart:
    """Horizontal stacked bars. `rows`: (bar, part, amount)."""
    bars = list(dict.fromkeys(bar for bar, _, _ in rows))
    axis = {"title": unit, "grid": True, "format": "~s", "labelExpr": PLAIN_ZERO}
    spec = {
        "$schema": SCHEMA,
        "config": CONFIG,
        "width": WIDE,
        "height": len(bars) * (30 if len(bars) <= 12 else 16),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [{"name": "hidden", "value": []}],
        "transform": [{"filter": "indexof(hidden, datum.series) < 0"}],
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {
            "x": {"field": "y", "type": "quantitative", "stack": "zero", "axis": axis},
            "y": {"field": "bar", "type": "nominal", "sort": bars, "axis": {"title": None}},
            "order": {"field": "series", "type": "quantitative"},
            "color": {
                "field": "series",
                "type": "nominal",
                "scale": {
                    "domain": list(range(len(parts))),
                    "range": [colour(i + 1) for i in range(len(parts))],
                },
                "legend": None,
            },
            "tooltip": [
                {"field": "bar", "title": msg("monitor.report.column.bar")},
                {"field": "part", "title": msg("monitor.report.column.part")},
                {"field": "y", "title": unit},
            ],
        },
    }
    columns: dict[str, list[Any]] = {
        "bar": [bar for bar, _, _ in rows],
        "part": [part for _, part, _ in rows],
        "series": [parts.index(part) for _, part, _ in rows],
        "y": [amount for _, _, amount in rows],
    }
    return Chart(
        id, title, "", note, spec, columns, [(part, i + 1) for i, part in enumerate(parts)]
    )
