"""`python lib/run_module.py training.cli.monitor [--log=FILE | --run=DIR | --all] [--interval=3]
…`: see monitor_training.sh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import find_run, json_text, messages, project, rundir, standing
from training.core import log as console
from training.core.errors import Exit, UserError
from training.core.jsonl import number
from training.core.messages import msg
from training.host import program
from training.monitor import options, print_table, screen, state, term_text
from training.monitor.options import MonitorOptions
from training.monitor.run_status import ENDED, STARTING
from training.monitor.state import StateSource

if TYPE_CHECKING:
    from training.core.contracts.run_files import SupervisorRecord
    from training.core.contracts.state import RunsState, RunState


def main(argv: list[str]) -> int:
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(__doc__)
            return int(Exit.DONE)
        program.require_output()
        return _show(chosen, _source(chosen))
    except UserError as error:
        console.report(error, closing=msg("cli.monitor.nothing_to_show"))
        return int(error.code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except OSError as error:
        return program.unwritable(error)


def _source(chosen: MonitorOptions) -> StateSource:
    """The runs or the log to show. Raises UserError."""
    if chosen.all:
        from training.monitor.run_list import RunTable

        return RunTable(project.WORK / find_run.EXPERIMENTS)
    run, log = options.find(chosen, project.WORK)
    if run is not None:
        return state.RunWatch(run, log)
    from training.monitor.log_watch import LogWatch

    assert log is not None
    return LogWatch(log)


def _show(chosen: MonitorOptions, source: StateSource) -> int:
    ascii_only = print_table.in_ascii(chosen.ascii, term_text.EMPTY)
    if ascii_only:
        os.environ[messages.VARIABLE] = "en"  # Chinese would be question marks
    on_terminal = sys.stdout.isatty()
    if chosen.json:
        print(json_text.answer(_only_look(source)), flush=True)
        return int(Exit.DONE)
    from training.monitor import live, terminal

    if chosen.once:
        width, height = terminal.size()
        if not on_terminal:
            width, height = _variable("COLUMNS", 80), _variable("LINES", 24)
        view = screen.View(width, height - on_terminal, ascii_only=ascii_only)
        terminal.print_screen(_screen(_only_look(source), view))
        return int(Exit.DONE)
    follow = chosen.follow_exit
    if chosen.prometheus and not on_terminal and not follow:
        from training.monitor import prometheus

        prometheus.serve(_reader(chosen, source), chosen.prometheus, chosen.interval_s)
        return int(Exit.DONE)
    with _exported(chosen):
        if on_terminal and os.environ.get("TERM", "dumb") != "dumb":
            seen = live.Live(source, chosen.interval_s, ascii_only=ascii_only, follow_exit=follow)
            if isinstance(source, state.RunWatch) and chosen.run is None and chosen.log is None:
                seen.newer = _newer
            return seen.go()
        last = live.lines(source, chosen.interval_s, ascii_only=ascii_only, follow_exit=follow)
        return live.status(last) if follow and "run" in last else int(Exit.DONE)


def _only_look(source: StateSource) -> RunState | RunsState:
    return source.read_all() if isinstance(source, state.RunWatch) else source.read()


def _screen(seen: RunState | RunsState, view: screen.View) -> list[str]:
    if "runs" not in seen:
        return screen.screen(seen, view)
    from training.monitor import run_list

    return run_list.screen(seen, view)


def _reader(
    chosen: MonitorOptions, source: StateSource
) -> Callable[[], Sequence[RunState | RunsState]]:
    """A function that reads the current state; if no run was given, it switches to another one as
    _successor() decides."""
    shown, seen = source, None

    def read() -> list[RunState | RunsState]:
        nonlocal shown, seen
        if seen and chosen.run is None and chosen.log is None:
            shown = _successor(shown, seen) or shown
        seen = shown.read()
        # the machine too: a finished run's last state may be old
        return [*seen["runs"], seen] if "runs" in seen else [seen]

    return read


def _successor(shown: StateSource, seen: RunState | RunsState) -> state.RunWatch | None:
    """After the end of a run, the newest one; before its start, for which its job may be queued
    without end, one that has started, or else the newest one."""
    if not isinstance(shown, state.RunWatch) or "run" not in seen:
        return None
    run = seen["run"]
    if run["state"] in ENDED:
        return None if run["supervisor_alive"] else _newer(shown)
    if run["state"] != STARTING or _has_started(seen) or standing.starter(shown.run) is not None:
        return None
    return _active(shown.run.path.parent) or _newer(shown)


def _active(experiments: Path) -> state.RunWatch | None:
    """The newest run that has started and not ended."""
    from training.monitor.run_list import MOST

    for _, path in sorted(find_run.planned(experiments), reverse=True)[:MOST]:
        run = rundir.RunDir(path)
        # cheaper than reading a run
        if any(standing.ends(run)) or not _may_live(run):
            continue
        watch = state.RunWatch(run)
        seen = watch.read(0.0)
        if seen["run"]["state"] not in ENDED and _has_started(seen):
            return watch
    return None


def _may_live(run: rundir.RunDir) -> bool:
    plan = rundir.read_json(run.plan) or {}
    if supervisor := standing.supervisor_of(run, plan):
        return standing.is_active(run, cast("SupervisorRecord", supervisor))
    created = number(plan.get("created")) or 0.0
    alive = standing.ranks_may_live(run, plan, created)  # of another launcher
    return bool(alive) and standing.quiet_s(run) < standing.ELSEWHERE_S


def _has_started(seen: RunState) -> bool:
    """The supervisor may be on another machine, and another launcher has none."""
    return seen["run"]["supervisor_pid"] is not None or any(r["pid"] for r in seen["ranks"])


def _newer(shown: StateSource) -> state.RunWatch | None:
    """The newest run, if it is not the one shown."""
    assert isinstance(shown, state.RunWatch)
    run = find_run.newest(shown.run.path.parent)
    return state.RunWatch(run) if run and run.path != shown.run.path else None


@contextlib.contextmanager
def _exported(chosen: MonitorOptions) -> Iterator[None]:
    """With --prometheus, an exporter beside the screen, with its own source, so that keys do not
    affect the metrics. Raises UserError."""
    if chosen.prometheus is None:
        yield
        return
    from training.monitor.prometheus import Exporter

    exporter = Exporter(chosen.prometheus, _reader(chosen, _source(chosen)), chosen.interval_s)
    exporter.start()
    try:
        yield
    finally:
        exporter.close()


def _variable(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and 1 <= int(value) <= 10_000 else otherwise


if __name__ == "__main__":
    program.replace_unknown()
    if sys.stdout is not None and not sys.stdout.isatty():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under `… | head`
    sys.exit(main(sys.argv[1:]))
