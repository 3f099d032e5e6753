"""The end of a sweep: table sorted by loss, the best run, the page."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from training.cli.sweep.board import print_lines
from training.core import log, rundir, standing
from training.core.errors import UserError
from training.core.jsonl import whole
from training.core.messages import msg
from training.core.next_command import next_command
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import SweepRow
from training.plan import finished

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord


def show(folder: SweepDir, record: SweepRecord, *, ascii_only: bool) -> None:
    """Print the table, and write the page."""
    rows = sweep_runs.ranked(sweep_runs.read(folder, record))
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    lines = sweep_runs.lines(rows, msg("monitor.column.time"), width)
    print_lines(lines, ascii_only=ascii_only)
    best = sweep_runs.best(rows)
    command = longer(folder, best) if best else ""
    if best:
        print(msg("cli.sweep.best", name=best.name, command=command))
    sys.stdout.flush()
    if any(row.step for row in rows):
        _write(folder, rows, command)


def longer(folder: SweepDir, best: SweepRow) -> str:
    """The command that trains the best run for twice as long, or continues it."""
    run = RunDir(folder.experiments / best.name)
    try:
        plan = standing.read_plan(run)
    except UserError:  # of a later version
        return ""
    if plan is None:
        return ""
    steps = whole(best.step) or 0
    changes = finished.longer(plan["config"], steps) if best.state == FINISHED else {}
    return next_command(plan, run, **changes)


def _write(folder: SweepDir, rows: list[SweepRow], command: str) -> None:
    # loads the chart package
    from training.monitor.report import chart_render, run, sweep_page

    chart_render.warm_up()
    shown = [row for row in rows if row.found][: sweep_page.CURVES]
    seen = [(row, run.read_run(RunDir(folder.experiments / row.name))) for row in shown]
    page = sweep_page.page(folder.name, rows, seen, command)
    try:
        rundir.write_bytes(folder.page, page.html().encode("utf-8", "replace"))
    except OSError as error:
        log.warning(msg("cli.report.unwritable", out=folder.page, error=error.strerror))
        return
    print(msg("cli.sweep.page", page=folder.page))
