"""Pictures of the page: SVG without a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#2563eb", "#9ca3af", "#059669", "#d97706", "#7c3aed")
WIDTH, BAR, GAP, LABEL, VALUE = 760, 18, 14, 210, 120
PLOT_HEIGHT, LEFT, TOP, BOTTOM = 260, 56, 12, 34
TICKS = 4


def bars(groups: Mapping[str, Mapping[str, float | None]], text: Callable[[float], str]) -> str:
    """Horizontal bars: group → series → value; None has no bar."""
    values = [v for group in groups.values() for v in group.values() if v]
    scale = (WIDTH - LABEL - VALUE) / max(values, default=1)
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    out, y = [], 4.0
    for title, group in groups.items():
        middle = y + len(group) * BAR / 2 + 5
        out.append(_text(LABEL - 10, middle, title, "end", ""))
        for name, value in group.items():
            colour, length = COLOURS[series.index(name) % len(COLOURS)], scale * (value or 0)
            shown = "not measured" if value is None else text(value)
            out.append(
                f'<rect x="{LABEL}" y="{y:.0f}" width="{max(length, 1):.1f}" '
                f'height="{BAR - 4}" fill="{colour}">'
                f"<title>{escape(f'{title}, {name}: {shown}')}</title></rect>"
            )
            out.append(_text(LABEL + length + 6, y + 12, shown))
            y += BAR
        y += GAP
    return _legend(series) + _svg(out, y)


def lines(curves: Mapping[str, Sequence[float]], x_title: str) -> str:
    """A line for each curve, from step 1."""
    points = [value for curve in curves.values() for value in curve]
    if not points:
        return ""
    low, high = min(points), max(points)
    high = high if high > low else low + 1
    longest = max(len(curve) for curve in curves.values())
    across, bottom = WIDTH - LEFT - 20, PLOT_HEIGHT - BOTTOM

    def place(step: int, value: float) -> str:
        x = LEFT + across * step / max(1, longest - 1)
        return f"{x:.1f},{TOP + (bottom - TOP) * (high - value) / (high - low):.1f}"

    out = []
    for n in range(TICKS + 1):
        value = low + (high - low) * n / TICKS
        y = TOP + (bottom - TOP) * (1 - n / TICKS)
        out.append(f'<path d="M{LEFT} {y:.0f}H{WIDTH - 20}" class="grid"/>')
        out.append(_text(LEFT - 8, y + 4, f"{value:.2f}", "end"))
    for number, curve in enumerate(curves.values()):
        path = " ".join(place(step, value) for step, value in enumerate(curve))
        # Equal curves lie on each other: later ones are thinner and dashed.
        style = f'stroke-width="{max(1.5, 6 - 1.6 * number):.1f}"'
        style += f' stroke-dasharray="{2 + 3 * number} {3 * number}"' if number else ""
        colour = COLOURS[number % len(COLOURS)]
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {style}/>')
    out.append(_text(LEFT, PLOT_HEIGHT - 8, "1"))
    out.append(_text(WIDTH - 20, PLOT_HEIGHT - 8, f"{x_title} {longest}", "end"))
    return _legend(list(curves)) + _svg(out, PLOT_HEIGHT)


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "value") -> str:
    place = f'x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{escape(text)}</text>"


def _legend(names: Sequence[str]) -> str:
    marks = (
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def _svg(parts: Sequence[str], height: float) -> str:
    return wide(f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>')


def wide(part: str) -> str:
    """Scrolls where the window is narrower."""
    return f'<div class="wide">{part}</div>'
