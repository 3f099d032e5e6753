"""Page of a sweep: its runs, the best first, with the fields in which they differ, and their
curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core import units
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.monitor.report import chart_types, compare_page, run_charts
from training.monitor.report.curve import score_text
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import ReportPage, code
from training.monitor.report.run import Run, read_run
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.facts import RunFacts
from training.monitor.runs.sweep import SweepRow
from training.monitor.runs.table import shown

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord

CURVES = 24  # runs, the best ones: as many as there are line styles
Seen = Sequence[tuple[SweepRow, Run]]


def of(folder: SweepDir, record: SweepRecord) -> ReportPage:
    """The page of a sweep as it is on disk."""
    rows = sweep_runs.ranked(sweep_runs.read(folder, record))
    best = sweep_runs.best(rows)
    begun = [row for row in rows if row.found][:CURVES]
    seen = [(row, read_run(RunDir(folder.experiments / row.name))) for row in begun]
    return page(folder.name, rows, seen, sweep_runs.longer(folder, best) if best else "")


def page(name: str, rows: Sequence[SweepRow], seen: Seen, command: str) -> ReportPage:
    """`rows`: all runs, the best first; `seen`: those whose curves are shown, in the same order;
    `command`: trains the best one longer, or continues it; '' if there is none."""
    runs = [run for _, run in seen]
    titles = [row.title or row.name for row, _ in seen]
    out = ReportPage(
        msg("monitor.sweep.page_title", name=name),
        _head(name, rows, command),
        pauses=any(run.pauses for run in runs),
    )
    out.counted = compare_page.common_unit(runs)
    title = (
        msg("monitor.sweep.runs_in_order")
        if sweep_runs.mixed_data(rows)
        else msg("monitor.sweep.runs")
    )
    out.add("runs", title, _table(rows, [row for row, _ in seen]))
    compare_page.add_curves(out, runs, titles)
    compare_page.add_machines(out, runs, titles)
    compare_page.add_failures(out, runs, titles)
    return out


def _head(name: str, rows: Sequence[SweepRow], command: str) -> Html:
    best = sweep_runs.best(rows)
    lines: list[Html] = [tag("h1", msg("monitor.sweep.heading", name=name))]
    if best:
        text = msg("monitor.sweep.best", title=best.title or best.name, loss=_loss(best))
        lines.append(tag("p", text))
        if command:
            advice = (
                msg("monitor.sweep.longer")
                if best.state == FINISHED
                else msg("monitor.sweep.longer_unfinished")
            )
            lines.append(tag("p", advice, " ", code(command)))
    elif sweep_runs.mixed_data(rows):
        lines.append(tag("p", msg("monitor.sweep.other_data"), class_="notice"))
    waiting = sum(row.found is None for row in rows)
    if waiting:
        lines.append(tag("p", msg("monitor.sweep.not_started", count=waiting), class_="notice"))
    if len(rows) - waiting > CURVES:
        lines.append(tag("p", msg("monitor.sweep.curves", count=CURVES), class_="notice"))
    return join(lines)


def _loss(row: SweepRow) -> str:
    found = row.found
    unit = found.loss_unit if found else None
    return " ".join(filter(None, [_score(found), score_text(row.loss), unit]))


def _score(found: RunFacts | None) -> str:
    """What the loss of a run is: 'validation', or 'loss' of its last step."""
    if not found or not found.loss_name or found.loss_name == "loss":
        return msg("monitor.sweep.loss")
    return run_charts.titled(found.loss_name)[0].lower()


def _table(rows: Sequence[SweepRow], seen: Sequence[SweepRow]) -> Html:
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    best = sweep_runs.best(rows)
    loss = _score(next((r.found for r in rows if r.found and r.found.loss_name), None))
    counted = {row.found.unit for row in rows if row.found and row.found.unit}
    per_s = f"{counted.pop()}/s" if len(counted) == 1 else msg("monitor.sweep.speed")
    numbers = [loss, msg("monitor.sweep.best_step"), msg("monitor.report.axis.steps"), per_s]
    numbers.append(msg("monitor.report.axis.time"))
    head: list[object] = ["", *names, msg("monitor.report.column.state")]
    head += [{"": title, "class_": "n"} for title in numbers]
    head.append(msg("monitor.report.column.run"))
    out: list[list[object]] = []
    for place, row in enumerate(rows, 1):
        at = seen.index(row) + 1 if row in seen else 0
        mark = tag("i", class_="key", style=f"background:{chart_types.swatch(at)}") if at else None
        cells: list[object] = [join([mark, place])]
        cells += [code(shown(row.values[name])) if name in row.values else "-" for name in names]
        cells.append(tag("span", sweep_runs.word(row.state), class_=row.state))
        star = "*" if row.starred else ""
        step = row.found.best_step if row.found else None
        figures = [
            f"{score_text(row.loss)}{star}",
            "-" if step is None else f"{step:,}",
            "-" if row.step is None else f"{row.step:,}",
            units.count(row.speed),
            units.duration(row.seconds),
        ]
        for number, text in enumerate(figures):
            marked = "n best" if row is best and not number else "n"
            cells.append({"": text, "class_": marked})
        out.append([*cells, {"": row.name, "style": "white-space:nowrap"}])
    starred = any(row.starred for row in rows)
    note = tag("p", msg("monitor.sweep.star"), class_="hint") if starred else None
    return join([table(head, out), note])
