"""Text sections of a page on what happened: failure, checks, events, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from training.core import messages, units
from training.core.check_names import check_title
from training.core.jsonl import Record, items, text
from training.core.messages import msg
from training.core.units import clock, duration
from training.diagnose import card
from training.monitor import launches
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import code, folded
from training.monitor.report.run import PICTURE_BYTES, PICTURES, Run
from training.monitor.report.timeline import describe

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord

FULL_TIME = "%Y-%m-%d %H:%M:%S"
EVENTS = 400  # rows
NOTABLE = (
    "verdict",
    "failure",
    "given_up",
    "warning",
    "injected",
    "restart",
    "recovered",
    "pace",
    "takeover",
    "requeue",
)
# Fields of failure.json that the card needs; an older or incomplete file may lack some.
CARD: Record = {
    "cause": "unknown",
    "kind": "",
    "rank": None,
    "summary": "",
    "phase": None,
    "phases": {},
    "where": None,
    "waiting": {},
    "stacks": None,
    "evidence": [],
    "advice": [],
    "log": "",
}


def failure(run: Run) -> Html | None:
    """The failure card, as on the console."""
    if not run.failure:
        return None
    try:
        shown = card.of_run(cast("FailureRecord", {**CARD, **run.failure}))
    except (KeyError, TypeError, AttributeError):  # not written by Duet's supervisor
        shown = (
            f"{text(run.failure.get('cause')) or 'unknown'}: "
            f"{text(run.failure.get('summary')) or msg('monitor.report.sections.no_summary')}"
        )
    return tag(
        "div",
        tag("pre", *(tag("span", f"{line}\n") for line in shown.rstrip().split("\n"))),
        class_="card",
        id="failure",
        lang=messages.language(),
    )


def checks(run: Run) -> Html | None:
    if not run.checks:
        return None
    rows, statuses = (
        [],
        {
            "ok": msg("monitor.report.check.ok"),
            "warning": msg("monitor.report.check.warning"),
            "error": msg("monitor.report.check.error"),
        },
    )
    for check in run.checks:
        fixes = (tag("div", code(fix)) for fix in items(check.get("fixes")))
        found = check.get("status")
        status = {"": statuses.get(str(found), found), "class_": found}
        rows.append(
            [check_title(str(check.get("name"))), status, join([check.get("text", ""), *fixes])]
        )
    notes = [n for n in items(run.plan.get("notes")) if isinstance(n, str)]
    return join(
        [
            table(
                (msg("monitor.report.column.check"), "", msg("monitor.report.column.found")), rows
            ),
            *(tag("p", note, class_="notice") for note in notes),
        ]
    )


def events(run: Run) -> Html | None:
    """Table of the notable events, then of all events."""
    notable = [_event(e, run) for e in run.events if e["event"] in NOTABLE]
    everything = [_event(e, run) for e in run.events]
    head = (
        msg("monitor.report.column.time"),
        msg("monitor.report.column.after"),
        msg("monitor.report.column.event"),
        msg("monitor.report.events.what"),
    )
    total, file = len(everything) + run.left_out.total(), run.folder.events.name
    count = units.plural(total, "event")
    title = (
        msg("monitor.report.events.all_last", count=count, shown=EVENTS, file=file)
        if total > EVENTS
        else msg("monitor.report.events.all", count=count)
    )
    earlier = max(0, len(notable) - EVENTS) + sum(run.left_out[kind] for kind in NOTABLE)
    left_out = msg(
        "monitor.report.events.left_out", count=units.plural(earlier, "event"), file=file
    )
    parts = [
        tag("p", left_out, class_="sub") if earlier else None,
        table(head, notable[-EVENTS:])
        if notable
        else tag("p", msg("monitor.report.events.none"))
        if everything
        else None,
        folded(title, table(head, everything[-EVENTS:])) if everything else None,
    ]
    if run.metrics.back_s > 1:
        note = msg("monitor.report.events.clock_back", duration=duration(run.metrics.back_s))
        parts.insert(0, tag("p", note, class_="notice"))
    return join(parts)


def _event(event: Record, run: Run) -> list[object]:
    at = launches.clock(event)
    cells = [
        {"": clock(event.get(launches.RECORDED, at), FULL_TIME), "class_": "when"},
        {"": duration(run.since(at)), "class_": "when"},
    ]
    return [*cells, event["event"], describe(event)]


def samples(run: Run) -> Html | None:
    """Generated text and pictures."""
    sample = text(run.summary.get("sample"))
    shown = [p for p in run.pictures if p.address]
    too_large = [f"{p.name} ({units.size(p.size)})" for p in run.pictures if not p.address]
    why = msg(
        "monitor.report.samples.not_shown",
        count=PICTURES,
        size=PICTURE_BYTES >> 20,
        names=", ".join(too_large[:20]),
    )
    pictures = [
        tag("figure", tag("img", src=p.address, alt=p.name), tag("figcaption", p.name))
        for p in shown
    ]
    parts = [
        tag("pre", sample.rstrip(), class_="sample") if sample and sample.strip() else None,
        tag("div", *pictures, class_="pictures") if shown else None,
        tag("p", why, class_="sub") if too_large else None,
    ]
    return join(parts)
