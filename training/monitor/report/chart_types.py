"""Chart, its series, their colours, and the style of the Vega-Lite specifications.

Colours are variables of the page's style (`var(--c1)`), so one picture suits the light theme, the
dark theme and paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from training.core.messages import msg
from training.monitor.report.curve import PointPosition

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# width of a picture and height of its plot area, pixels
WIDE, HALF, TALL, LOW = (
    900,
    436,
    260,
    170,
)
COLOURS = 8
# horizontal axes besides the step, in the page only; tokens: or the unit that the run counts
OTHER_AXES = (
    "time",
    "tokens",
)
LINE, THIN, DOTS = "line", "thin", "dots"
# for the first, second and third use of a colour
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
    """One curve. `colour`: number of a colour, from 1; 0: muted text."""

    name: str
    colour: int
    style: str
    points: list[tuple[PointPosition, float]]
    # of this series, in its colour
    marks: list[tuple[PointPosition, str]] = field(default_factory=list)


# JSON of Vega-Lite, or a part of it, as its schema defines
VegaSpec = dict[str, Any]


@dataclass
class Chart:
    """A chart with its data. `columns`: name → values of all rows. `legend`: (name, colour) of each
    series. `hover`: rows have series, step, time and tokens, and the page shows the values under
    the mouse."""

    id: str
    title: str
    unit: str
    note: str
    spec: VegaSpec
    columns: dict[str, list[Any]]
    legend: list[tuple[str, int]] = field(default_factory=list)
    wide: bool = True
    log: bool = False  # offers a logarithmic scale
    named: bool = True  # shows the names of the series
    faint: tuple[int, ...] = ()  # series that are drawn thin
    hover: bool = False

    def complete(self) -> VegaSpec:
        """The specification with the data of a picture."""
        keys = [key for key in self.columns if not self.hover or key not in OTHER_AXES]
        rows = zip(*(self.columns[key] for key in keys), strict=True)
        return {
            **self.spec,
            "data": {"values": [dict(zip(keys, row, strict=True)) for row in rows]},
        }


def joined(parts: Iterable[str]) -> str:
    """The notes that are not empty, as one."""
    return msg("monitor.report.notes_separator").join(filter(None, parts))


def colour(number: int) -> str:
    return f"var(--c{(number - 1) % COLOURS + 1})" if number else "var(--soft)"


def dash(number: int) -> list[int]:
    return DASHES[max(0, number - 1) // COLOURS % len(DASHES)]


def swatch(number: int) -> str:
    """CSS `background` of the legend entry of a curve."""
    line, gap = dash(number)
    paint = colour(number)
    return (
        f"repeating-linear-gradient(90deg,{paint} 0 {line}px,transparent {line}px {line + gap}px)"
        if gap
        else paint
    )
