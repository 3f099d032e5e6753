"""Frame of a page: head, contents, sections, charts, in one file without external resources."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from training.core import messages, metric_units
from training.core.messages import msg
from training.monitor.report import chart_render, charts
from training.monitor.report.chart_types import Chart, colour, swatch
from training.monitor.report.html import Html, data, join, table, tag, text

FOREIGN = re.compile(r"[^A-Za-z0-9_-]")
ROWS = 12  # of a table that replaces a chart


@dataclass
class Section:
    id: str
    title: str
    content: Html
    short: str = ""  # title in the contents, if different


@dataclass
class ReportPage:
    """Content of a page. `failed`: charts that could not be drawn, with the error. `pauses`: times
    exclude pauses. `counted`: unit that all runs count; None if they differ or it is unknown.
    `timed`: steps have times."""

    title: str
    head: Html
    sections: list[Section] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    pauses: bool = False
    counted: str | None = metric_units.TOKENS
    timed: bool = True

    def add(self, id: str, title: str, *content: object, short: str = "") -> None:
        """Adds a section, unless it is empty."""
        if inside := join(content):
            self.sections.append(Section(id, title, inside, short))

    def figures(self, charts: Sequence[Chart | None]) -> Html:
        """Pictures of the charts, which page.js replaces by interactive charts."""
        figures = join(self._figure(chart) for chart in charts if chart)
        return tag("div", figures, class_="charts") if figures else figures

    def _figure(self, chart: Chart) -> Html:
        # The id may be any key of metrics.jsonl, and the picture, which has it, is not escaped.
        chart.id = FOREIGN.sub("_", chart.id)
        chart.id += f"_{len(self.ids)}" if chart.id in self.ids else ""
        self.ids.add(chart.id)
        if chart_render.available():
            try:
                inside = tag(
                    "div",
                    Html(chart_render.picture(chart)),
                    class_="plot",
                    role="img",
                    aria_label=msg("monitor.report.page.chart_label", title=chart.title),
                )
                self.charts.append(chart)
            except ValueError as error:
                self.failed.append(f"{chart.title}: {str(error).splitlines()[0]}")
                inside = stand_in(chart)
        else:
            inside = stand_in(chart)
        log = (
            tag(
                "button",
                msg("monitor.report.page.log"),
                type="button",
                class_="log",
                aria_pressed="false",
                title=msg("monitor.report.page.log_scale"),
            )
            if chart.log
            else None
        )
        heading = tag(
            "div",
            tag("h3", chart.title, tag("small", chart.unit) if chart.unit else None),
            log,
            class_="heading",
        )
        caption = tag(
            "figcaption", heading, tag("p", chart.note) if chart.note else None, legend(chart)
        )
        return tag(
            "figure",
            caption,
            inside,
            id=f"chart-{chart.id}",
            class_="wide-chart" if chart.wide else None,
        )

    def html(self) -> str:
        own, curves = Html(_file("page.js")), any(chart.hover for chart in self.charts)
        # without a curve the pictures suffice
        drawing = chart_render.program() if curves else ""
        facts = {
            "pauses": self.pauses,
            "counted": self.counted,
            "mark": charts.MARK,
            "beyond": charts.BEYOND,
            "plain_label": charts.PLAIN_ZERO,
        }
        axes = (
            {"step": msg("monitor.report.axis.steps")}
            | ({"time": msg("monitor.report.axis.time")} if self.timed else {})
            | ({"tokens": self.counted} if self.counted else {})
        )
        nav = join(tag("a", s.short or s.title, href=f"#{s.id}") for s in self.sections)
        body = [
            tag(
                "nav",
                tag("div", nav, class_="contents"),
                _controls(axes if curves else {}),
                aria_label=msg("monitor.report.page.contents"),
            ),
            tag(
                "main",
                self.head,
                _without_charts() if not chart_render.available() else None,
                *(
                    tag("p", msg("monitor.report.page.not_drawn", line=line), class_="notice")
                    for line in self.failed
                ),
                *(tag("section", tag("h2", s.title), s.content, id=s.id) for s in self.sections),
                tag(
                    "footer",
                    msg("monitor.report.page.footer"),
                ),
            ),
            tag(
                "script",
                data([_record(c) | facts for c in self.charts]),
                type="application/json",
                id="charts",
            )
            if curves
            else None,
            tag("script", data(_words()), type="application/json", id="words") if curves else None,
            tag("script", _packed(drawing), type="application/gzip", id="program")
            if curves
            else None,
            tag("script", own, type="module"),
        ]
        head = [
            tag("meta", charset="utf-8"),
            tag(
                "meta",
                http_equiv="Content-Security-Policy",
                content=_policy([own, *([drawing] if drawing else [])]),
            ),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", self.title),
            tag("style", Html(_file("page.css"))),
        ]
        page = tag("html", tag("head", *head), tag("body", *body), lang=messages.language())
        return f"<!doctype html>\n{page}\n"


def _without_charts() -> Html:
    package = chart_render.PACKAGE
    text = msg("monitor.report.page.tables", package=package)
    return tag("p", text, class_="notice")


def _words() -> dict[str, str]:
    """The words of page.js; what is in braces is replaced there."""
    unit, step = "{unit}", "{step}"
    return {
        "hours": msg("monitor.report.axis.hours"),
        "minutes": msg("monitor.report.axis.minutes"),
        "seconds": msg("monitor.report.axis.seconds"),
        "step": msg("monitor.report.axis.step"),
        "since": msg("monitor.report.axis.since_start", unit=unit),
        "since_without_pauses": msg("monitor.report.axis.since_start_without_pauses", unit=unit),
        "at_step": msg("monitor.report.at_step", step=step),
    }


def state_name(state: str) -> str:
    """The state of a run for people."""
    names = {
        "starting": msg("monitor.report.state.starting"),
        "running": msg("monitor.report.state.running"),
        "finished": msg("monitor.report.state.finished"),
        "stopped": msg("monitor.report.state.stopped"),
        "failed": msg("monitor.report.state.failed"),
        "died": msg("monitor.report.state.died"),
    }
    return names.get(state, state)


def _packed(source: str) -> Html:
    """gzip and base64: less than half of the size."""
    return Html(base64.b64encode(gzip.compress(source.encode(), mtime=0)).decode())


def _policy(scripts: Sequence[str]) -> str:
    """Content security policy: no external resources, and only the page's own scripts, so that
    scripts injected by names or samples do not run."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def _record(chart: Chart) -> dict[str, object]:
    names, paints = [name for name, _ in chart.legend], [colour(paint) for _, paint in chart.legend]
    facts = {
        "names": names,
        "paints": paints,
        "swatches": [swatch(paint) for _, paint in chart.legend],
    }
    return {
        "id": chart.id,
        "spec": chart.spec,
        "columns": chart.columns,
        "hover": chart.hover,
        **facts,
    }


def _controls(axes: Mapping[str, str]) -> Html:
    """Buttons of the page. `axes`: horizontal axes of the curves, key → name."""
    axis = join(
        tag(
            "button",
            word,
            type="button",
            data_axis=key,
            aria_pressed="true" if key == "step" else "false",
            title=msg("monitor.report.page.curves_over", word=word),
        )
        for key, word in axes.items()
    )
    theme = tag(
        "button",
        "◐",
        type="button",
        id="theme",
        title=msg("monitor.report.page.theme"),
        aria_label=msg("monitor.report.page.theme"),
    )
    return tag(
        "div",
        tag("span", axis, class_="choice") if len(axes) > 1 else None,
        theme,
        class_="controls",
    )


def legend(chart: Chart) -> Html | None:
    """Names and colours of the series; in an interactive chart each toggles its curve."""
    hides = any(param["name"] == "hidden" for param in chart.spec.get("params", ()))
    return (
        names(chart.legend, "data-series" if hides else "", chart.faint)
        if chart.named and len(chart.legend) > 1
        else None
    )


def names(legend: Sequence[tuple[str, int]], kind: str, faint: Sequence[int] = ()) -> Html:
    """Legend. `kind`: attribute of the buttons: data-series toggles a curve of one chart, data-name
    the curves of that name in all charts; empty: no buttons."""
    parts = []
    for i, (name, paint) in enumerate(legend):
        inside = join(
            [
                tag(
                    "i", style=f"background:{swatch(paint)}", class_="faint" if i in faint else None
                ),
                name,
            ]
        )
        parts.append(
            tag("button", inside, type="button", **{kind: name}, aria_pressed="true")
            if kind
            else tag("span", inside)
        )
    return tag("div", *parts, class_="legend")


def stand_in(chart: Chart) -> Html:
    """Table that replaces a chart."""
    if not chart.hover:
        keys = [key for key in chart.columns if key not in ("paint", "series")]
        rows = [
            [_short(chart.columns[key][i]) for key in keys]
            for i in range(min(ROWS * 4, len(chart.columns[keys[0]])))
        ]
        heads = {
            "lane": msg("monitor.report.column.lane"),
            "kind": msg("monitor.report.column.kind"),
            "at": msg("monitor.report.column.at"),
            "to": msg("monitor.report.column.to"),
            "text": msg("monitor.report.column.text"),
            "lasts": msg("monitor.report.column.lasts"),
            "bar": msg("monitor.report.column.bar"),
            "part": msg("monitor.report.column.part"),
        }
        return table([heads.get(key, key) for key in keys], rows)
    points: dict[int, dict[int, float]] = {}
    for series, step, y in zip(
        *(chart.columns[key] for key in ("series", "step", "y")), strict=True
    ):
        if y is not None:
            points.setdefault(series, {})[step] = y
    steps = sorted({step for values in points.values() for step in values})
    shown = (
        sorted({steps[i * (len(steps) - 1) // max(1, ROWS - 1)] for i in range(ROWS)})
        if steps
        else []
    )
    names = [name for name, _ in chart.legend]
    rows = [
        [f"{step:,}", *(_nearest(points.get(i, {}), step) for i in range(len(names)))]
        for step in shown
    ]
    return table([msg("monitor.report.axis.step"), *names], rows)


def _nearest(values: dict[int, float], step: int) -> str:
    return _short(values[min(values, key=lambda s: abs(s - step))]) if values else "-"


def _short(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else "" if value is None else str(value)


def tiles(figures: Sequence[tuple[str, object, object]]) -> Html:
    """Headline figures: (name, value, note)."""
    boxes = (
        tag("div", tag("dt", what), tag("dd", value, tag("small", word) if word else None))
        for what, value, word in figures
    )
    return tag("dl", *boxes, class_="tiles")


def folded(summary: str, content: object, *, shown: bool = False) -> Html:
    return tag("details", tag("summary", summary), content, open=shown)


def code(value: object) -> Html:
    return tag("code", text(value))


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
