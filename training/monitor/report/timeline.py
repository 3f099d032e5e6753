"""Timeline of a run: start-ups, training, evaluations, time without progress, notable events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from training.core import units
from training.core.cells import cells
from training.core.jsonl import Record, number, text, whole
from training.core.messages import msg
from training.core.units import duration
from training.monitor.launches import RECORDED, clock
from training.monitor.report import chart_types, charts
from training.monitor.report.chart_types import Chart
from training.monitor.report.run import Run

START, TRAINING, EVALUATION, LOST = "start", "training", "evaluation", "lost"  # kinds of bars
LANES = 6  # more starts share one lane
MARKS = 400
PLAIN, WARN, BAD = "var(--c3)", "var(--warn)", "var(--bad)"
ENDINGS = ("end", "failure", "restart")
LANE, LABEL_WIDTH = 26, 130  # pixels
CHARACTER = 7  # pixels; the browser's font may be wider than the one that vl-convert measures


@dataclass(frozen=True)
class TimelineBar:
    """A period on a lane, in seconds since the start."""

    lane: str
    kind: str
    from_s: float
    to_s: float
    text: str = ""


@dataclass(frozen=True)
class TimelineMark:
    """A moment on a lane."""

    lane: str
    at_s: float
    text: str
    colour: str


def _moments() -> dict[str, tuple[str, str]]:
    """Event → its lane, its colour."""
    return {
        "checkpoint": (msg("monitor.report.timeline.checkpoints"), PLAIN),
        "injected": (msg("monitor.report.timeline.injected"), WARN),
        "warning": (msg("monitor.report.timeline.warnings"), WARN),
        "verdict": (msg("monitor.report.timeline.verdicts"), BAD),
        "failure": (msg("monitor.report.timeline.failures"), BAD),
        "given_up": (msg("monitor.report.timeline.failures"), BAD),
        "restart": (msg("monitor.report.timeline.restarts"), WARN),
        "requeue": (msg("monitor.report.timeline.restarts"), WARN),
    }


def _units() -> tuple[tuple[str, float, float], ...]:
    """Name, length in s, shortest timeline in s that uses it."""
    return (
        (msg("monitor.report.axis.hours"), 3600.0, 7200.0),
        (msg("monitor.report.axis.minutes"), 60.0, 180.0),
        (msg("monitor.report.axis.seconds"), 1.0, -math.inf),
    )


def _kinds() -> dict[str, str]:
    """The kinds of bars with their names."""
    return {
        TRAINING: msg("monitor.report.timeline.training"),
        EVALUATION: msg("monitor.report.timeline.evaluation"),
        START: msg("monitor.report.timeline.start_up"),
        LOST: msg("monitor.report.timeline.no_progress"),
    }


def timeline_chart(run: Run) -> Chart | None:
    begun = run.begun
    if not begun:
        return None
    end = run.until
    moments = _moments()
    evaluated = _some(run.metrics.evaluations)
    bars = [bar for bar in _bars(run, begun, end, evaluated) if bar.to_s > bar.from_s >= 0]
    marks = [
        TimelineMark(lane, run.since(clock(event)), describe(event), paint)
        for event in run.events
        if event["event"] in moments
        for lane, paint in [moments[event["event"]]]
    ]
    marks += [
        TimelineMark(
            msg("monitor.report.timeline.pauses"),
            run.since(since),
            msg("monitor.report.timeline.not_running", duration=duration(until - since)),
            PLAIN,
        )
        for since, until in run.pauses
    ]
    shown = _newest(marks)
    older = sum(count for kind, count in run.left_out.items() if kind in moments)
    left = len(marks) - len(shown) + older
    hidden = len(run.metrics.evaluations) - len(evaluated)
    total = duration(run.since(end))
    notes = [
        msg("monitor.report.timeline.total_without_pauses", total=total)
        if run.pauses
        else msg("monitor.report.timeline.total", total=total),
        msg("monitor.report.timeline.events_left_out", left=left) if left > 0 else "",
        msg("monitor.report.timeline.evaluations_left_out", left=hidden) if hidden else "",
    ]
    note = chart_types.joined(notes)
    return _chart(bars, shown, note, paused=bool(run.pauses))


def _newest(marks: Sequence[TimelineMark]) -> list[TimelineMark]:
    """MARKS of them in the same order; the oldest checkpoints are left out first."""
    many = msg("monitor.report.timeline.checkpoints")
    by_weight = sorted(range(len(marks)), key=lambda i: marks[i].lane != many)
    return [marks[i] for i in sorted(by_weight[-MARKS:])]


def _some(evaluations: dict[int, Record]) -> dict[int, Record]:
    """At most MARKS of them, evenly spaced."""
    return dict(islice(evaluations.items(), 0, None, max(1, -(-len(evaluations) // MARKS))))


def _bars(run: Run, begun: float, end: float, evaluated: dict[int, Record]) -> list[TimelineBar]:
    starts = [event for event in run.events if event["event"] == "start"]
    if not starts:  # a user script, or no rank has started yet
        script = bool(run.plan.get("script"))
        return [
            TimelineBar(
                msg("monitor.report.timeline.run"),
                TRAINING if script or run.metrics.steps else START,
                0.0,
                run.since(end),
            )
        ]
    planned = run.planned or begun
    bars = []
    for i, start in enumerate(starts):
        since, until = clock(start), clock(starts[i + 1]) if i + 1 < len(starts) else end
        before = [clock(e) for e in run.events if e["event"] == "restart" and clock(e) <= since]
        launched = max(
            [
                t
                for t in (begun, planned, *before[-1:], *(until for _, until in run.pauses))
                if t <= since and (not i or t > clock(starts[i - 1]))
            ],
            default=since,
        )
        over = min(
            (clock(e) for e in run.events if e["event"] in ENDINGS and since < clock(e) <= until),
            default=until,
        )
        over = min([over, until, *(begin for begin, _ in run.pauses if begin > since)])
        lane = (
            msg("monitor.report.timeline.start_number", number=i + 1)
            if len(starts) <= LANES
            else msg("monitor.report.timeline.training")
        )
        step = whole(start.get("step")) or 0
        bars.append(TimelineBar(lane, START, run.since(launched), run.since(since)))
        lost = next(
            (
                number(e.get("seconds_lost")) or 0.0
                for e in run.events
                if e["event"] == "restart" and over <= clock(e) < until
            ),
            0.0,
        )
        stopped = min(over, max(since, over - lost))
        bars.append(
            TimelineBar(
                lane,
                TRAINING,
                run.since(since),
                run.since(stopped),
                msg("monitor.report.timeline.from_step", step=step),
            )
        )
        bars.append(
            TimelineBar(
                lane,
                LOST,
                run.since(stopped),
                run.since(over),
                msg("monitor.report.timeline.until_stopped"),
            )
        )
        for step, record in evaluated.items():
            at, took = clock(record), (number(record.get("eval_ms")) or 0.0) / 1000
            if since <= at <= over:
                bars.append(
                    TimelineBar(
                        lane,
                        EVALUATION,
                        run.since(at) - took,
                        run.since(at),
                        msg("monitor.report.at_step", step=step),
                    )
                )
    return bars


def _chart(
    bars: Sequence[TimelineBar], marks: Sequence[TimelineMark], note: str, *, paused: bool
) -> Chart | None:
    if not bars and not marks:
        return None
    end = max([*(bar.to_s for bar in bars), *(mark.at_s for mark in marks)])
    unit, size = next((name, size) for name, size, least in _units() if end >= least)
    lanes = list(dict.fromkeys([*(bar.lane for bar in bars), *(mark.lane for mark in marks)]))
    kinds = _kinds()
    colours = {kind: chart_types.colour(i + 1) for i, kind in enumerate(kinds)}
    rows: list[tuple[Any, ...]] = []
    for bar in bars:
        lasts = round(bar.to_s - bar.from_s, 3)
        rows.append(
            (
                bar.lane,
                kinds[bar.kind],
                bar.from_s / size,
                bar.to_s / size,
                bar.text,
                colours[bar.kind],
                lasts,
            )
        )
    rows += [
        (mark.lane, "", mark.at_s / size, None, mark.text, mark.colour, None) for mark in marks
    ]
    keys = ("lane", "kind", "at", "to", "text", "paint", "lasts")
    columns = {key: list(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)}
    since = (
        msg("monitor.report.axis.since_start_without_pauses", unit=unit)
        if paused
        else msg("monitor.report.axis.since_start", unit=unit)
    )
    axis = {"title": since, "grid": True}
    x = {
        "field": "at",
        "type": "quantitative",
        "axis": axis,
        "scale": {"nice": False, "domain": [0, 1.015 * end / size or 1]},
    }
    y = {
        "field": "lane",
        "type": "nominal",
        "sort": lanes,
        "axis": {
            "title": None,
            "grid": True,
            "labelLimit": LABEL_WIDTH,
            "minExtent": min(LABEL_WIDTH, CHARACTER * max(map(cells, lanes))),
        },
    }
    paint = {"field": "paint", "type": "nominal", "scale": None, "legend": None}
    of_bar = [
        {"field": "kind", "title": msg("monitor.report.column.kind")},
        {"field": "lasts", "title": msg("monitor.report.axis.seconds")},
        {"field": "text", "title": msg("monitor.report.events.what")},
    ]
    of_mark = [
        {"field": "text", "title": msg("monitor.report.events.what")},
        {"field": "at", "title": unit},
    ]
    zoom = charts.zoom()
    layers = [
        {
            "params": [zoom | {"select": {**zoom["select"], "encodings": ["x"]}}],
            "transform": [{"filter": "datum.to !== null"}],
            "mark": {"type": "bar", "height": {"band": 0.6}, "clip": True},
            "encoding": {"x": x, "x2": {"field": "to"}, "y": y, "color": paint, "tooltip": of_bar},
        },
        {
            "transform": [{"filter": "datum.to === null"}],
            "mark": {
                "type": "point",
                "shape": "diamond",
                "filled": True,
                "size": 80,
                "opacity": 1,
                "clip": True,
            },
            "encoding": {"x": x, "y": y, "color": paint, "tooltip": of_mark},
        },
    ]
    spec = {
        "$schema": chart_types.SCHEMA,
        "config": chart_types.CONFIG,
        "width": chart_types.WIDE,
        "height": LANE * len(lanes),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }
    used = [
        (name, i + 1)
        for i, (kind, name) in enumerate(kinds.items())
        if any(bar.kind == kind for bar in bars)
    ]
    return Chart("timeline", msg("monitor.report.timeline.title"), "", note, spec, columns, used)


def describe(event: Record) -> str:
    """One line for an event: its own text, or its fields."""
    kind, message, step = event["event"], text(event.get("text")), whole(event.get("step"))
    if kind == "failure":
        return f"{event.get('cause')}: {message}"
    if message:
        return message
    if kind == "start":
        return msg(
            "monitor.report.events.start",
            step=step,
            total=event.get("total_steps") or "?",
            ranks=units.plural(whole(event.get("world_size")) or 0, "rank"),
        )
    if kind == "shards":
        pieces = {
            "sequences": msg("monitor.report.events.sequences"),
            "samples": msg("monitor.report.events.samples"),
        }
        unit = text(event.get("pieces")) or "sequences"
        return msg(
            "monitor.report.events.shards",
            epoch=event.get("epoch"),
            proven=event.get("proven_sequences"),
            pieces=pieces.get(unit, unit),
        )
    if kind == "recovered":
        return msg(
            "monitor.report.events.recovered", step=step, seconds=number(event.get("seconds")) or 0
        )
    facts = {
        k: v
        for k, v in event.items()
        if k not in ("time", RECORDED, "event", "path", "step") and not isinstance(v, (dict, list))
    }
    shown = ([msg("monitor.report.at_step", step=step)] if step is not None else []) + [
        f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items()
    ]
    return ", ".join(shown) or kind
