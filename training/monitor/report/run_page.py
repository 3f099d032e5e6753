"""Page of one run."""

from __future__ import annotations

import statistics

from training import tasks
from training.core import metric_units
from training.core.jsonl import text
from training.core.units import clock, plural
from training.monitor.alerts import MEASURED_STEPS, SLOW_RANK
from training.monitor.report import curve, headline, run_charts, sections, timeline
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import ReportPage, folded, tiles
from training.monitor.report.run import Run, value_of
from training.monitor.run_status import FAILED

EVEN_PERCENT = 5  # ranks whose compute times differ by less are balanced
HINT = (
    "Hover over a curve for its values. Drag to pan, Ctrl + wheel to zoom, double-click to "
    "reset; click a name to hide it."
)


def page(run: Run, spoken: str) -> ReportPage:
    out = ReportPage(
        f"{run.name} · Duet",
        _head(run, spoken),
        pauses=bool(run.pauses),
        counted=None if run.script else run.counted,
    )
    out.timed = not run.metrics.steps or bool(curve.clock(run.metrics.last))
    drawn = out.figures([run_charts.loss(run), *run_charts.small(run)])
    if drawn:
        out.add("curves", "Curves", tag("p", HINT, class_="hint"), drawn)
    out.add("timeline", "Timeline", out.figures([timeline.timeline_chart(run)]))
    out.add(
        "balance",
        "Balance of the ranks",
        _balance(run),
        out.figures([run_charts.balance(run), run_charts.phases(run)]),
        short="Balance",
    )
    out.add("samples", "Samples", sections.samples(run))
    out.add("configuration", "Configuration", sections.configuration(run))
    out.add("data", "Data and batch", sections.data(run), short="Data")
    out.add("machine", "Machine and software", sections.environment(run), short="Machine")
    out.add("checks", "Preflight checks", sections.checks(run), short="Checks")
    out.add("events", "Warnings and events", sections.events(run), short="Events")
    return out


def _head(run: Run, spoken: str) -> Html:
    facts = run.state["run"]
    elapsed = run.lasted_s
    ranks, device = facts["ranks"], text(facts["device"])
    data = metric_units.data(run.plan)
    words = [
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}" + (f" on {_devices(run)}" if device else "")
        if ranks
        else None,
        text(value_of(run.plan, "precision")),
        f"task {run.task}" if run.task not in (tasks.DEFAULT.name, run.script) else None,
        f"data {data}" if data else None,
        f"script {run.script}" if run.script else None,
        f"started {clock(run.begun, sections.FULL_TIME)}" if run.begun else None,
        f"{'took' if run.ended else 'running for'} "
        f"{headline.lasted(elapsed)}{' without pauses' if run.pauses else ''}"
        if elapsed is not None
        else None,
        f"{run.starts} starts" if run.starts > 1 else None,
        plural(facts["restarts"], "restart") if facts["restarts"] else None,
    ]
    now = clock(run.state["time_unix_s"], sections.FULL_TIME)
    reason = None if run.failure and facts["state"] == FAILED else facts["reason"]
    nothing = None
    if run.script:
        source = f" ({facts['source']})" if facts["source"] else ""
        nothing = (
            f"User script: its figures are read from its output{source}."
            if run.metrics.steps
            else "User script without recognised figures: see the logs of its ranks."
        )
    elif not run.metrics.steps:
        nothing = (
            "No curves: no step was finished."
            if run.ended
            else "No curves yet: no step is finished."
        )
    return join(
        [
            tag("h1", run.name, tag("span", facts["state"], class_=f"state {facts['state']}")),
            tag("p", " · ".join(w for w in words if w), class_="sub"),
            tag("p", f"This run has not ended; the report is as of {now}.", class_="notice")
            if not run.ended
            else None,
            tag("p", reason, class_="notice") if reason else None,
            sections.failure(run, spoken),
            tiles(headline.figures(run)),
            tag("p", nothing, class_="notice") if nothing else None,
        ]
    )


def _devices(run: Run) -> str:
    names = [str(g.get("name")) for g in run.plan.get("gpus") or [] if isinstance(g, dict)]
    return ", ".join(sorted(set(names))) or str(run.state["run"]["device"]).upper()


def _balance(run: Run) -> Html | None:
    """Sentence on the slowest rank, and a table of compute time and memory per rank."""
    own = run_charts.own_times(run)
    memory = [curve.extent for curve in run.metrics.by_rank.get("memory_bytes", [])]
    if not any(own):
        return None
    rows = [
        [
            f"rank {rank}",
            {"": f"{value:.1f} ms" if value is not None else "-", "class_": "n"},
            {"": _mib(memory, rank), "class_": "n"},
        ]
        for rank, value in enumerate(own)
    ]
    known = sorted((value, rank) for rank, value in enumerate(own) if value is not None)
    sentence = None
    if len(known) > 1 and known[0][0] > 0:
        (_, least), (slowest, most) = known[0], known[-1]
        more = 100 * (slowest / known[0][0] - 1)
        slower = f"takes {more:.0f} % longer than rank {least}, the fastest"
        if more < EVEN_PERCENT:
            text = f"The ranks are balanced: the slowest, rank {most}, {slower}."
        elif run.metrics.steps < MEASURED_STEPS:
            text = (
                f"Too few steps (fewer than {MEASURED_STEPS}) to call a rank slow: the slowest so "
                f"far, rank {most}, {slower}."
            )
        elif slowest > SLOW_RANK * statistics.median(value for value, _ in known[:-1]):
            text = f"Rank {most} is slow: it {slower}."
        else:
            text = (
                f"No rank is slow: the slowest, rank {most}, {slower}, which is normal on a shared "
                f"machine."
            )
        sentence = tag("p", text)
    each = table(
        ("", {"": "compute time, median", "class_": "n"}, {"": "peak memory", "class_": "n"}), rows
    )
    return join(
        [
            sentence,
            each if len(rows) <= run_charts.RANKS else folded(f"all {len(rows)} ranks", each),
        ]
    )


def _mib(extents: list[tuple[float, float] | None], rank: int) -> str:
    extent = extents[rank] if rank < len(extents) else None
    return f"{extent[1] / run_charts.MIB:,.0f} MiB" if extent else "-"
