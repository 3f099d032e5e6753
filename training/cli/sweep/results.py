"""The end of a sweep: table sorted by loss, the best run, the page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.messages import msg
from training.core.sweep_dir import SweepDir
from training.monitor import print_table
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord


def show(folder: SweepDir, record: SweepRecord, *, ascii_only: bool) -> None:
    """Print the table, and write the page."""
    rows = sweep_runs.ranked(sweep_runs.read(folder, record))
    width = print_table.columns()
    lines = sweep_runs.lines(rows, msg("monitor.column.time"), width)
    print_table.print_lines(lines, width, ascii_only=ascii_only)
    best = sweep_runs.best(rows)
    if best:
        print(msg("cli.sweep.best", name=best.name))
        if command := sweep_runs.longer(folder, best):
            advice = (
                msg("cli.sweep.longer", command=command)
                if best.state == FINISHED
                else msg("cli.sweep.longer_unfinished", command=command)
            )
            print(f"  {advice}")
    elif sweep_runs.mixed_data(rows):
        print(msg("monitor.sweep.other_data"))
    sys.stdout.flush()
    if any(row.step for row in rows):
        _write(folder, record)


def _write(folder: SweepDir, record: SweepRecord) -> None:
    # loads the chart package
    from training.monitor.report import chart_render, sweep_page

    chart_render.warm_up()
    page = sweep_page.of(folder, record)
    try:
        rundir.write_bytes(folder.page, page.html().encode("utf-8", "replace"))
    except OSError as error:
        log.warning(msg("cli.report.unwritable", out=folder.page, error=error.strerror))
        return
    print(msg("cli.sweep.page", page=folder.page))
