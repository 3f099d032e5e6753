"""Page of one run."""

from __future__ import annotations

import statistics

from training import tasks
from training.core import metric_units
from training.core.jsonl import items, text
from training.core.messages import msg
from training.core.units import MIB, clock, plural
from training.monitor import launches
from training.monitor.alerts import MEASURED_STEPS, SLOW_RANK
from training.monitor.report import (
    headline,
    plan_sections,
    profile_section,
    run_charts,
    sections,
    timeline,
)
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import ReportPage, folded, state_name, tiles
from training.monitor.report.run import Run, value_of
from training.monitor.run_status import FAILED, ranks_of

EVEN_PERCENT = 5  # ranks whose compute times differ by less are balanced


def page(run: Run) -> ReportPage:
    out = ReportPage(
        f"{run.name} · Duet",
        _head(run),
        pauses=bool(run.pauses),
        counted=None if run.script else run.counted,
    )
    out.timed = not run.metrics.steps or bool(launches.clock(run.metrics.last))
    drawn = out.figures([run_charts.loss(run), *run_charts.small(run)])
    if drawn:
        hint = msg("monitor.report.run.hint")
        out.add("curves", msg("monitor.report.title.curves"), tag("p", hint, class_="hint"), drawn)
    out.add(
        "timeline",
        msg("monitor.report.title.timeline"),
        out.figures([timeline.timeline_chart(run)]),
    )
    out.add(
        "balance",
        msg("monitor.report.title.balance"),
        _balance(run),
        out.figures([run_charts.balance(run), run_charts.phases(run)]),
        short=msg("monitor.report.title.balance_short"),
    )
    out.add(
        "profile",
        msg("monitor.report.title.profile"),
        out.figures([profile_section.shares_chart(run)]),
        profile_section.tables(run),
    )
    out.add("samples", msg("monitor.report.title.samples"), sections.samples(run))
    out.add(
        "configuration", msg("monitor.report.title.configuration"), plan_sections.configuration(run)
    )
    out.add(
        "data",
        msg("monitor.report.title.data"),
        plan_sections.data(run),
        short=msg("monitor.report.title.data_short"),
    )
    out.add(
        "machine",
        msg("monitor.report.title.machine"),
        plan_sections.environment(run),
        short=msg("monitor.report.title.machine_short"),
    )
    out.add(
        "checks",
        msg("monitor.report.title.checks"),
        sections.checks(run),
        short=msg("monitor.report.title.checks_short"),
    )
    out.add(
        "events",
        msg("monitor.report.title.events"),
        sections.events(run),
        short=msg("monitor.report.title.events_short"),
    )
    return out


def _head(run: Run) -> Html:
    facts = run.state["run"]
    elapsed = run.lasted_s
    ranks, device = facts["ranks"], text(facts["device"])
    data = metric_units.data(run.plan)
    count = ranks_of(ranks, facts.get("planned_ranks")) if ranks else ""
    skipped = run.state["training"].get("skipped_steps")
    words = [
        None
        if not ranks
        else msg("monitor.report.run.ranks_on", ranks=count, devices=_devices(run))
        if device
        else count,
        text(value_of(run.plan, "precision")),
        msg("monitor.report.run.task", task=run.task)
        if run.task not in (tasks.DEFAULT.name, run.script)
        else None,
        msg("monitor.report.run.data", data=data) if data else None,
        msg("monitor.report.run.script", script=run.script) if run.script else None,
        msg("monitor.report.run.started", begun=clock(run.begun, sections.FULL_TIME))
        if run.begun
        else None,
        _lasted(run, elapsed) if elapsed is not None else None,
        msg("monitor.report.run.starts", starts=run.starts) if run.starts > 1 else None,
        plural(facts["restarts"], "restart") if facts["restarts"] else None,
        msg("monitor.report.run.skipped", steps=plural(skipped, "step")) if skipped else None,
    ]
    now = clock(run.state["time_unix_s"], sections.FULL_TIME)
    reason = None if run.failure and facts["state"] == FAILED else facts["reason"]
    nothing = None
    if run.script:
        nothing = (
            msg("monitor.report.run.script_without_figures")
            if not run.metrics.steps
            else msg("monitor.report.run.script_figures_from", source=facts["source"])
            if facts["source"]
            else msg("monitor.report.run.script_figures")
        )
    elif not run.metrics.steps:
        nothing = (
            msg("monitor.report.run.no_curves")
            if run.ended
            else msg("monitor.report.run.no_curves_yet")
        )
    return join(
        [
            tag(
                "h1",
                run.name,
                tag("span", state_name(facts["state"]), class_=f"state {facts['state']}"),
            ),
            tag("p", " · ".join(w for w in words if w), class_="sub"),
            tag("p", msg("monitor.report.run.not_ended", now=now), class_="notice")
            if not run.ended
            else None,
            tag("p", reason, class_="notice") if reason else None,
            sections.failure(run),
            tiles(headline.figures(run)),
            tag("p", nothing, class_="notice") if nothing else None,
        ]
    )


def _lasted(run: Run, elapsed: float) -> str:
    shown = headline.lasted(elapsed)
    if run.pauses:
        shown = msg("monitor.report.run.without_pauses", duration=shown)
    return (
        msg("monitor.report.run.took", duration=shown)
        if run.ended
        else msg("monitor.report.run.running_for", duration=shown)
    )


def _devices(run: Run) -> str:
    names = [str(g.get("name")) for g in items(run.plan.get("gpus")) if isinstance(g, dict)]
    return ", ".join(sorted(set(names))) or str(run.state["run"]["device"]).upper()


def _balance(run: Run) -> Html | None:
    """Sentence on the slowest rank, and a table of compute time and memory per rank."""
    own = run_charts.own_times(run)
    memory = [curve.extent for curve in run.metrics.by_rank.get("memory_bytes", [])]
    if not any(own):
        return None
    rows = [
        [
            msg("monitor.report.rank", rank=rank),
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
        slower = msg("monitor.report.balance.slower", more=more, least=least)
        if more < EVEN_PERCENT:
            text = msg("monitor.report.balance.balanced", most=most, slower=slower)
        elif run.metrics.steps < MEASURED_STEPS:
            text = msg(
                "monitor.report.balance.too_few_steps",
                steps=MEASURED_STEPS,
                most=most,
                slower=slower,
            )
        elif slowest > SLOW_RANK * statistics.median(value for value, _ in known[:-1]):
            text = msg("monitor.report.balance.slow", most=most, slower=slower)
        else:
            text = msg("monitor.report.balance.normal", most=most, slower=slower)
        sentence = tag("p", text)
    each = table(
        (
            "",
            {"": msg("monitor.report.balance.compute_time"), "class_": "n"},
            {"": msg("monitor.report.balance.peak_memory", memory=run.memory_word), "class_": "n"},
        ),
        rows,
    )
    return join(
        [
            sentence,
            each
            if len(rows) <= run_charts.RANKS
            else folded(msg("monitor.report.balance.all_ranks", ranks=len(rows)), each),
        ]
    )


def _mib(extents: list[tuple[float, float] | None], rank: int) -> str:
    extent = extents[rank] if rank < len(extents) else None
    return f"{extent[1] / MIB:,.0f} MiB" if extent else "-"
