"""The end of a sweep: table sorted by loss, the best run, the page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.launcher import report_program
from training.launcher.stop_signals import StopSignals
from training.monitor import print_table
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord

PAGE_S = 300.0  # of hundreds of runs


def show(folder: SweepDir, record: SweepRecord, *, ascii_only: bool) -> None:
    """Print the table and the command that trains the best run longer."""
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


def write_page(folder: SweepDir, record: SweepRecord) -> None:
    """Write the page if any run has begun to train; a failure is a warning."""
    runs = [RunDir(folder.experiments / run["name"]) for run in record["runs"]]
    if not any(run.metrics.exists() for run in runs):
        return
    if report_program.write(folder.page, PAGE_S, StopSignals()):
        print(msg("cli.sweep.page", page=folder.page), flush=True)
