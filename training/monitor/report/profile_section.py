"""Section on the profile of a run (`--profile`): shares of a step, longest kernels or operators,
waits."""

from __future__ import annotations

from training.core import units
from training.core.jsonl import Record, items, number, text, whole
from training.core.messages import msg
from training.monitor.report import charts
from training.monitor.report.chart_types import Chart
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import code, folded
from training.monitor.report.run import Run

PARTS = ("data", "forward", "backward", "optimizer", "communication", "other", "idle")
SHOWN_RANKS = 8  # with tables; the chart has up to 64


def shares_chart(run: Run) -> Chart | None:
    """Stacked bars: milliseconds of a step by part, for each rank."""
    names, rows = _names(), []
    for profile in run.profiles:
        took, shares = number(profile.get("step_ms")) or 0.0, profile.get("shares")
        if not isinstance(shares, dict):
            continue
        bar = msg("monitor.report.rank", rank=profile.get("rank"))
        amounts = [(part, number(shares.get(part)) or 0.0) for part in PARTS]
        rows += [(bar, names[part], round(took * share, 4)) for part, share in amounts if share > 0]
    if not rows:
        return None
    used = [names[part] for part in PARTS if any(row[1] == names[part] for row in rows)]
    return charts.stacked(
        "profile",
        msg("monitor.report.profile.chart"),
        rows,
        used,
        unit="ms",
        note=_note(run.profiles[0]),
    )


def tables(run: Run) -> Html | None:
    """The longest kernels or operators and the waits of each rank, the first one unfolded."""
    if not run.profiles:
        return None
    first, *others = run.profiles[:SHOWN_RANKS]
    return join([_head(run), _of_rank(first), *(_folded(profile) for profile in others)])


def _names() -> dict[str, str]:
    return {
        "data": msg("monitor.report.profile.data"),
        "forward": "forward",
        "backward": "backward",
        "optimizer": msg("monitor.report.profile.optimizer"),
        "communication": msg("monitor.report.profile.communication"),
        "other": msg("monitor.report.profile.other"),
        "idle": msg("monitor.report.profile.idle"),
    }


def _on_gpu(profile: Record) -> bool:
    return profile.get("timeline") == "gpu"


def _note(profile: Record) -> str:
    return (
        msg("monitor.report.profile.gpu_note")
        if _on_gpu(profile)
        else msg("monitor.report.profile.host_note")
    )


def _head(run: Run) -> Html:
    profile = run.profiles[0]
    first, last = (whole(profile.get(key)) for key in ("first_step", "last_step"))
    steps = msg("monitor.report.profile.steps", steps=units.steps(first, last))
    where = msg("monitor.report.profile.traces")
    return tag("p", steps, " ", where, " ", code(run.folder.profile), class_="hint")


def _folded(profile: Record) -> Html:
    return folded(msg("monitor.report.rank", rank=profile.get("rank")), _of_rank(profile))


def _of_rank(profile: Record) -> Html:
    longest = [
        [
            code(text(one.get("name"))),
            _cell(units.count(number(one.get("count")))),
            _cell(units.milliseconds(number(one.get("ms")))),
            _cell(_percent(one.get("share"))),
        ]
        for one in items(profile.get("longest"))
        if isinstance(one, dict)
    ]
    names = _names()
    waits = [
        [
            code(
                names["communication"]
                if one.get("name") == "communication"
                else text(one.get("name"))
            ),
            text(one.get("operator")) or "-",
            names.get(str(one.get("part")), "-"),
            _cell(units.count(number(one.get("count")))),
            _cell(units.milliseconds(number(one.get("ms")))),
        ]
        for one in items(profile.get("waits"))
        if isinstance(one, dict)
    ]
    count = _cell(msg("monitor.report.profile.column.count"))
    took = _cell(msg("monitor.report.profile.column.ms"))
    kind = (
        msg("monitor.report.profile.column.kernel")
        if _on_gpu(profile)
        else msg("monitor.report.profile.column.operator")
    )
    share = _cell(msg("monitor.report.profile.column.share"))
    waited = (
        msg("monitor.report.profile.column.host_wait"),
        msg("monitor.report.profile.column.by"),
        msg("monitor.report.profile.column.part"),
    )
    return join(
        [
            table((kind, count, took, share), longest) if longest else None,
            tag("h3", msg("monitor.report.profile.waits")),
            table((*waited, count, took), waits) if waits else tag("p", _no_waits(profile)),
        ]
    )


def _no_waits(profile: Record) -> str:
    """Those for a GPU are in its timeline."""
    if profile.get("device") == "cuda" and not _on_gpu(profile):
        return msg("monitor.report.profile.waits_not_recorded")
    return msg("monitor.report.profile.no_waits")


def _cell(content: str) -> Record:
    return {"": content, "class_": "n"}


def _percent(value: object) -> str:
    found = number(value)
    return "-" if found is None else f"{100 * found:.1f} %"
