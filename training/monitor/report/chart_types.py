"""Chart, its series, their colours, and the style of the Vega-Lite specifications.

Colours are names of the page's style (`var(--c1)`), so that one picture is right in the light, in
the dark and on paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training.monitor.report.curve import PointPosition

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# pixels of a picture; of the area in which a chart draws
WIDE, HALF, TALL, LOW = (
    900,
    436,
    260,
    170,
)
COLOURS = 8
# beside the step, in the page only; tokens: or samples, what the runs count
OTHER_AXES = (
    "time",
    "tokens",
)
LINE, THIN, DOTS = "line", "thin", "dots"
# of the first, second, third time that a colour is used
DASHES: tuple[list[int], ...] = (
    [1, 0],
    [7, 3],
    [2, 3],
)
CONFIG = {
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "domainColor": "var(--rule)",
        "gridColor": "var(--grid)",
        "tickColor": "var(--rule)",
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelFlush": False,
        "labelOverlap": True,
        "tickSize": 4,
    },
    "axisX": {"grid": False, "tickCount": 8},
    "axisY": {"domain": False, "ticks": False, "minExtent": 42, "tickCount": 5},
}


@dataclass
class Series:
    """`colour`: number of a colour, from 1; 0: that of text which is less important."""

    name: str
    colour: int
    style: str
    points: list[tuple[PointPosition, float]]
    # of this series alone, in its colour
    marks: list[tuple[PointPosition, str]] = field(default_factory=list)


# JSON of Vega-Lite, or a part of it: its own schema says what it may hold
VegaSpec = dict[str, Any]


@dataclass
class Chart:
    """A chart with its data. `columns`: name → values of all rows; `legend`: (name, colour) of each
    series."""

    id: str
    title: str
    unit: str
    note: str
    spec: VegaSpec
    columns: dict[str, list[Any]]
    legend: list[tuple[str, int]] = field(default_factory=list)
    wide: bool = True
    log: bool = False  # whether a logarithmic scale is offered
    named: bool = True  # whether the names need to be shown
    faint: tuple[int, ...] = ()  # series that are drawn thin
    hover: bool = (
        False  # rows have series, step, time and tokens: the page shows what is below the mouse
    )

    def complete(self) -> VegaSpec:
        """The specification with the data that a picture needs."""
        keys = [key for key in self.columns if not self.hover or key not in OTHER_AXES]
        rows = zip(*(self.columns[key] for key in keys), strict=True)
        return {
            **self.spec,
            "data": {"values": [dict(zip(keys, row, strict=True)) for row in rows]},
        }


def colour(number: int) -> str:
    return f"var(--c{(number - 1) % COLOURS + 1})" if number else "var(--soft)"


def dash(number: int) -> list[int]:
    return DASHES[max(0, number - 1) // COLOURS % len(DASHES)]


def swatch(number: int) -> str:
    """The `background` of what stands for a curve in a legend."""
    line, gap = dash(number)
    paint = colour(number)
    return (
        f"repeating-linear-gradient(90deg,{paint} 0 {line}px,transparent {line}px {line + gap}px)"
        if gap
        else paint
    )
