"""Stop signals are never lost and never interrupt an action."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.core.errors import Exit
from training.core.project import ROOT
from training.core.rundir import RunDir, write_json
from training.host import process
from training.host.process import STOP_SIGNALS, remember_stops
from training.launcher import stop_signals, supervisor
from training.launcher.hosts.conductor import Conductor
from training.launcher.post_run import PostRun
from training.launcher.stop_signals import StopSignals

PLAN: Any = {
    "place": {"nnodes": 1},
    "resume": None,
    "launch": "a1b2",
    "created": 0.0,
    "config": {},
}
pytestmark = pytest.mark.usefixtures("handlers")


def test_a_stop_signal_is_kept_until_read() -> None:
    with StopSignals() as wanted:
        assert wanted.wait(0) is None
        os.kill(os.getpid(), signal.SIGTERM)
        with wanted:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert wanted.wait(3600) == signal.SIGTERM and wanted.read() == [], (
            "one read returns all of them"
        )
    assert all(signal.getsignal(number) == signal.SIG_IGN for number in STOP_SIGNALS), (
        "ignored while stopping"
    )


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    ("job", "terminal", "arrive", "new"),
    [
        ("", False, [(0, TERM), (0.01, TERM), (3, TERM), (3.01, TERM)], [0, 3]),
        ("", False, [(0, USR1), (0.01, USR1), (0.02, TERM)], [0, 0.02]),
        ("", False, [(0, INT), (0.3, INT)], [0, 0.3]),
        ("7", False, [(0, TERM), (0.01, TERM), (20, TERM), (21, INT)], [0, 21]),
        ("7", False, [(0, USR1), (120, TERM), (121, USR1)], [0]),
        ("7", False, [(0, INT), (10, TERM)], [0]),
        ("7", True, [(0, TERM), (3, TERM)], [0, 3]),
    ],
    ids=["pairs", "USR1", "Ctrl-C", "job", "time limit", "LSF", "salloc"],
)
def test_signals_that_repeat_a_request(
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    terminal: bool,
    arrive: list[tuple[float, int]],
    new: list[float],
) -> None:
    """In a batch job without a terminal TERM is a warning: its scheduler sends KILL itself."""
    now = [0.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop_signals.os, "isatty", lambda fd: terminal)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    requests = stop_signals.Requests()

    def is_new(at: float, number: int) -> bool:
        now[0] = at
        return requests.is_new(number)

    assert [at for at, number in arrive if is_new(at, number)] == new


def test_without_a_signal_the_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_after_the_end_of_the_ranks_changes_nothing() -> None:
    """While the report is written and the notification sent."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop_signals.raise_before_start()
    with StopSignals():
        pass
    for number in STOP_SIGNALS:
        assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGTERM, Exit.PREEMPTED, "stopped by SIGTERM before the start"),
        (signal.SIGINT, Exit.INTERRUPTED, "interrupted before the start"),
    ],
)
def test_a_signal_while_the_supervisor_is_imported_withdraws_the_run(
    tmp_path: Path, number: signal.Signals, code: Exit, how: str
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = RunDir(tmp_path / "run")
    run.create()
    early = remember_stops()
    os.kill(os.getpid(), number)
    found = supervisor._run(run, PLAN, set(), PostRun(run, PLAN), early)
    assert found == (code, f"{how}; {run.path} was removed") and not run.path.exists()


@pytest.mark.parametrize(
    ("shared", "earlier", "shown"),
    [
        (True, False, "{run.own} was removed"),
        (True, True, "run is unchanged"),
        (False, False, "{run.path} was removed"),
        (False, True, "run is unchanged"),
    ],
)
def test_a_machine_that_is_stopped_names_what_it_has_removed(
    shared: bool, earlier: bool, shown: str, tmp_path: Path
) -> None:
    """Not the files of an earlier start, which it would have continued."""
    run = RunDir(tmp_path / "run", 1)
    run.create()
    write_json(run.own_plan, {"shared": shared})
    if shared:
        write_json(run.plan, {"of": "node 0"})
    if earlier:
        write_json(run.machines if shared else run.plan_before, {"of": "an earlier start"})
    text = supervisor._run(run, PLAN, set(), PostRun(run, PLAN), [signal.SIGTERM])[1]
    assert text.partition("; ")[2] == shown.format(run=run)


def test_a_second_ctrl_c_ends_the_import() -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from training.host.process import remember_stops
asked = remember_stops()
for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print(*map(int, asked), flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "15 15 2\n")


def test_the_supervisor_gets_the_signals_of_its_launch_script_and_those_held_back_since() -> None:
    code = f"""
import os, runpy, signal, sys
from types import SimpleNamespace
sys.path.insert(0, {str(ROOT)!r})
import training.launcher
def main(argv, asked):
    os.kill(os.getpid(), signal.SIGUSR1)
    print(argv, *map(int, asked), flush=True)
    return 0
training.launcher.supervisor = sys.modules["training.launcher.supervisor"] = SimpleNamespace(main=main)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
os.kill(os.getpid(), signal.SIGTERM)  # before it handles signals
sys.argv = ["supervise", "run", "--stopped=INT"]
runpy.run_module("training.cli.supervise", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.stdout == "['run'] 2 15 10\n"


def test_long_work_is_interrupted_by_a_signal_that_still_counts() -> None:
    done = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the signal")

    with StopSignals() as wanted:
        wanted.unless_asked(work)
        assert not done and wanted.wait(0) == signal.SIGINT
        work()
        assert done, "other work continues"


def test_a_ctrl_c_that_was_ignored_at_the_start_stays_ignored() -> None:
    """As a script without job control has it for `COMMAND &`; TERM is sent on purpose."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_of_stop_signals()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    stop_signals.raise_before_start(remember_stops())
    with StopSignals() as wanted:
        os.kill(os.getpid(), signal.SIGINT)
        assert wanted.wait(0) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert wanted.wait(3600) == signal.SIGTERM
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with Conductor():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert blocked == {signal.SIGTERM, signal.SIGUSR1}


def test_a_signal_after_a_stop_ends_the_report() -> None:
    ending = StopSignals()  # that of PostRun
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
    with ending:
        os.kill(os.getpid(), signal.SIGINT)
        assert ending.wait(3600) == signal.SIGINT


def test_names_and_codes() -> None:
    assert [(stop_signals.name(n), stop_signals.code(n)) for n in STOP_SIGNALS] == [
        ("Ctrl-C", Exit.INTERRUPTED),
        ("SIGTERM", Exit.PREEMPTED),
        ("SIGUSR1", Exit.PREEMPTED),
    ]
