"""Train several runs that differ in some fields: a grid, or a list from a file;
one run per GPU side by side, on a CPU one after another. At the end, one table
and one page compare them.

Usage: ./duet sweep [CONFIG] --FIELD=A,B … [--key=value …] [OPTION…]
       ./duet sweep [CONFIG] --list=FILE [--key=value …] [OPTION…]
       ./duet sweep --resume=NAME | --show=NAME

  --FIELD=A,B       several values of any field, see ./launch_train.sh --help;
                    all combinations of several fields are trained; \\, is a
                    comma
  --list=FILE       one run per line: flags, or a JSON object of fields
  --name=NAME       of the sweep; the names of its runs begin with it
  --jobs=auto       runs side by side; auto: as many as the GPUs allow, one on
                    a CPU
  --gpus_per_run=1  GPUs of each run (on a CPU: ranks)
  --dry_run         plan all runs, show them with their expected time, start
                    none
  --fail_fast       stop the others when a run fails
  --yes             start more than 100 runs
  --resume=NAME     continue a sweep: finished runs are skipped, all others
                    resumed; so does the same command again
  --show=NAME       print the table and write the page of a sweep
  --ascii           no Unicode characters

Ctrl-C: the running trainings save a checkpoint and stop; twice: kill them.
Exit codes: 0 all runs finished; 2 invalid command line or configuration,
nothing started; 3 missing resource, nothing started; 4 a run failed (5: all
that failed hung); 75, 130 stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from training.cli.sweep import config_files, naming, options, prepare, results
from training.cli.sweep.board import Board
from training.cli.sweep.options import SweepOptions
from training.cli.sweep.prepare import Sweep
from training.cli.sweep.session import Session, again
from training.core import file_lock, log, messages, sweep_dir, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import typed
from training.core.units import plural
from training.host import process, program
from training.monitor import print_table
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed((__doc__ or "").rstrip()))
            return int(Exit.DONE)
        if chosen.problems and (chosen.resume or chosen.show):
            raise UserError(chosen.problems)
        experiments = options.experiments(chosen, os.environ)
        if chosen.show:
            folder, record = sweep_dir.find(
                chosen.show,
                experiments,
                lambda name: sweep_dir.command("show", name, experiments),
            )
            results.show(folder, record, ascii_only=chosen.ascii)
            results.write_page(folder, record)
            return int(Exit.DONE)
        sweep = (
            prepare.resume(chosen, os.environ, experiments)
            if chosen.resume
            else prepare.prepare(chosen, argv, os.environ)
        )
        for text in sweep.warnings:
            log.warning(text)
        if chosen.dry_run:
            _print_plan(sweep, ascii_only=chosen.ascii)
            return int(Exit.DONE)
        log.of_launcher()
        process.outlive_terminal()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # nor does the end of `| tee log`
        return _train(sweep, chosen)
    except UserError as error:
        log.report(error, closing=msg("cli.sweep.nothing_started"))
        return int(error.code)


def _train(sweep: Sweep, chosen: SweepOptions) -> int:
    messages.load_all()
    try:
        code = _run(sweep, chosen)
    except OSError as error:
        file = error.filename or sweep.folder.path
        what = msg("cli.sweep.unwritable", file=file, error=error.strerror)
        allowed = msg("config.saved.writable_file")
        raise UserError(Problem("output.unwritable", what, allowed), Exit.RESOURCES) from None
    with _unread():
        results.show(sweep.folder, sweep.record, ascii_only=chosen.ascii)
    with _unread():
        results.write_page(sweep.folder, sweep.record)
    if code != Exit.DONE and not config_files.all_lost(sweep.folder, sweep.record):
        log.warning(msg("cli.sweep.continue", command=again(sweep), code=code))
    return code


@contextmanager
def _unread() -> Iterator[None]:
    """Output whose reader may have ended, or whose terminal was closed; `--show` has it too."""
    try:
        yield
    except BrokenPipeError:
        program.discard_output()
    except OSError as error:
        program.unwritable(error)


def _run(sweep: Sweep, chosen: SweepOptions) -> int:
    """Train what is left; the exit code. Raises OSError for a folder that cannot be written."""
    with _alone(sweep):
        board = Board(sweep, ascii_only=chosen.ascii)
        session = Session(sweep, board, fail_fast=chosen.fail_fast)
        session.begin()
        left = sum(state != FINISHED for state in session.states)
        runs = plural(len(session.states), "run")
        if not left:
            log.success(msg("cli.sweep.all_finished", name=sweep.folder.name, runs=runs))
        elif left < len(session.states):
            log.info(msg("cli.sweep.continued", name=sweep.folder.name, runs=runs, left=left))
        else:
            log.info(msg("cli.sweep.begins", name=sweep.folder.name, runs=runs, jobs=_jobs(sweep)))
        code = session.go() if left else int(Exit.DONE)
        board.clear()
    return code


@contextmanager
def _alone(sweep: Sweep) -> Iterator[None]:
    """Only one process runs a sweep, and creates a new one, if the file system has locks. Raises
    UserError, OSError."""
    sweep.folder.path.mkdir(parents=True, exist_ok=True)
    with open(sweep.folder.lock, "w") as lock:
        try:
            file_lock.take(lock)
        except BlockingIOError:
            what = msg("cli.sweep.locked", name=sweep.folder.name)
            fixes = ["./duet monitor --all"]
            raise UserError(
                Problem("sweep.running", what, msg("cli.sweep.one_at_a_time"), fixes)
            ) from None
        if not sweep.known:
            if sweep.folder.exists():  # created by another process since the check
                raise UserError(naming.taken(sweep.folder))
            sweep.folder.create(sweep.record)
        yield


def _print_plan(sweep: Sweep, *, ascii_only: bool) -> None:
    rows = sweep_runs.read(sweep.folder, sweep.record)
    expected = sweep.expected_s or [None] * len(rows)
    for row, seconds in zip(rows, expected, strict=True):
        row.seconds = seconds if row.state == sweep_runs.WAITING else row.seconds
    width = print_table.columns()
    lines = sweep_runs.lines(rows, msg("monitor.column.time"), width)
    print_table.print_lines(lines, width, ascii_only=ascii_only)
    known = [seconds for seconds in expected if seconds is not None]
    time = (
        msg("cli.sweep.expected", time=units.duration(sum(known) / sweep.jobs))
        if len(known) == len(rows)
        else ""
    )
    runs, ranks = plural(len(rows), "run"), plural(sweep.record["ranks"], "rank")
    print(msg("cli.sweep.plan", runs=runs, ranks=ranks, jobs=_jobs(sweep), time=time))
    if sweep.slots[0].visible:
        print(msg("cli.sweep.slots", slots="; ".join(map(str, sweep.slots))))
    print(msg("cli.sweep.folder", folder=sweep.folder.path, first=rows[0].name))


def _jobs(sweep: Sweep) -> str:
    if sweep.jobs == 1:
        return msg("cli.sweep.one_by_one")
    return msg("cli.sweep.at_once", jobs=sweep.jobs)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pages=True))
