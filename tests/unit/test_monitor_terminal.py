"""The live view on a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.unit.monitor_person import Person
from tests.unit.monitor_runs import Made, dead_pid
from training.core.contracts.state import RunState
from training.monitor import live, state


def test_live_view_on_a_terminal(made: Made, sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    assert person.screen.cursor.hidden
    rows = person.screen.display
    assert rows[0].startswith("Duet  small run") and re.search(r"RUNNING  \d\d:\d\d:\d\d$", rows[0])
    assert "step 100 of 400  25.0 %" in rows[2] and rows[2].startswith("█")
    assert re.match(
        r" +0 +\d+ +7 +[\d.]+ s  step 7: forward", next(r for r in rows if "forward" in r)
    )
    assert rows[23].startswith("q quit")
    assert person.screen.buffer[0][len("Duet  ")].bold and any(
        cell.fg != "default" for cell in person.screen.buffer[0].values()
    )

    made.step(101, 1.2345)  # new values appear without a key
    person.until(lambda: "loss 1.2345" in person.sees and "step 101 of 400" in person.sees)
    person.until(lambda: "CPU load" not in person.sees)  # CPU use is known from the second reading

    person.resize(40, 120)
    person.until(lambda: person.screen.display[39].startswith("q quit"))
    assert (
        re.search(r"RUNNING  \d\d:\d\d:\d\d$", person.screen.display[0])
        and len(person.screen.display[0]) == 120
    )
    assert person.sees.count("q quit") == 1 and "(ends " in person.sees

    person.resize(12, 50)
    person.until(
        lambda: (
            person.screen.display[0].startswith("Duet  ")
            and person.screen.display[11].startswith("q quit")
        )
    )
    assert "RUNNING" in person.screen.display[0] and person.sees.count("Duet  ") == 1

    person.child.send("x")  # any other key does nothing
    person.child.send("q")
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert person.raw.index(b"\x1b[?1049h") < person.raw.index(b"\x1b[?1049l")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_restore_the_terminal(sit: Callable[..., Person], number: int, status: int) -> None:
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    before = person.screen.cursor.hidden
    person.child.kill(number)
    assert person.left() == (status, None)
    assert before and not person.screen.cursor.hidden and b"Traceback" not in person.raw


def test_ctrl_c_and_ctrl_z_on_the_keyboard(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    person.child.sendcontrol("z")
    person.until(lambda: not person.screen.cursor.hidden)  # the terminal is restored for the shell
    person.until(lambda: psutil.Process(person.child.pid).status() == psutil.STATUS_STOPPED)
    person.child.kill(signal.SIGCONT)
    person.until(
        lambda: person.screen.cursor.hidden and person.screen.display[23].startswith("q quit")
    )
    person.child.sendcontrol("c")
    assert person.left() == (130, None)
    assert not person.screen.cursor.hidden


def test_follow_exit_leaves_a_last_screen(made: Made, sit: Callable[..., Person]) -> None:
    rank = subprocess.Popen(["sleep", "600"])
    try:
        made.supervisor(rank.pid)
        person = sit("--ascii", "--follow-exit")
        person.until(lambda: "RUNNING" in person.sees)
        made.summary()
    finally:
        rank.kill()
        rank.wait()
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert (
        "FINISHED" in person.screen.display[0]
        and "done: loss" in person.sees
        and person.sees.isascii()
    )


def test_stays_after_the_end_until_quit(made: Made, sit: Callable[..., Person]) -> None:
    made.supervisor(dead_pid()).failure()
    person = sit()
    person.until(lambda: "FAILED" in person.sees and "gpu_oom on rank 1" in person.sees)
    person.child.send("q")
    assert person.left() == (0, None)
    assert "FAILED" in person.screen.display[0]  # the last screen stays


def test_follow_exit_exits_with_the_status_of_the_run(
    made: Made, sit: Callable[..., Person]
) -> None:
    rank = subprocess.Popen(["sleep", "600"])
    try:
        made.supervisor(rank.pid)
        person = sit("--follow-exit")
        person.until(lambda: "RUNNING" in person.sees)
        made.failure()  # while the supervisor is alive, it may restart the ranks
        person.until(lambda: "FAILED" in person.sees)
        assert person.child.isalive()
    finally:
        rank.kill()
        rank.wait()
    assert person.left() == (4, None)


def test_lines_do_not_end_while_the_supervisor_may_restart_the_ranks(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the failure, and pauses before the next start."""
    monkeypatch.setattr(live, "END_GRACE_S", 0.0)
    made.supervisor(os.getpid()).steps(10).failure()
    watch, states = state.RunWatch(made.run), list[str]()

    class Source:
        def read(self, patience_s: float = 0.0) -> RunState:
            if len(states) == 3:
                made.run.failure.unlink()
            if len(states) == 4:
                made.summary()
            seen = watch.read(patience_s)
            states.append(seen["run"]["state"])
            return seen

    live.lines(Source(), 0.01, ascii_only=True, follow_exit=False)
    assert states[:5] == ["failed"] * 3 + ["running", "finished"]


def test_a_read_that_fails_keeps_the_last_state(
    made: Made, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a network file system fails now and then."""
    made.supervisor(dead_pid()).steps().summary()
    source, stale = state.RunWatch(made.run), OSError(116, "Stale file handle")
    seen = source.read()
    view = live.Live(source, 0.01, ascii_only=False, follow_exit=False)
    view.state = seen
    answers = iter([stale, stale, seen, seen])

    def read(*_: object) -> RunState:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(source, "read", read)
    view._read()
    assert view.state is seen and "Stale file handle" in view._unread
    assert live.lines(source, 0.01, ascii_only=False, follow_exit=True) is seen
    assert "the run cannot be read now: Stale file handle" in capfd.readouterr().err
    view._read()
    assert not view._unread


def test_newer_run_replaces_one_that_has_ended(
    tmp_path: Path, copied: Callable[[Path], Path], people: Callable[..., Person]
) -> None:
    """Without --run the monitor switches to the newest run."""
    command = copied(tmp_path / "project")
    project = command.parent
    Made(project / "experiments" / "first").supervisor(dead_pid()).steps(20).summary()
    person = people("--interval=0.2", command=str(command))
    person.until(lambda: "Duet  first" in person.sees and "FINISHED" in person.sees)
    second = Made(project / "experiments" / "second", age_s=0.0).supervisor(os.getpid())
    person.until(lambda: "Duet  second" in person.sees)
    second.supervisor(dead_pid()).summary()
    person.until(lambda: "FINISHED" in person.sees)
    Made(project / "experiments" / "third", age_s=0.0).supervisor(os.getpid())
    person.until(lambda: "Duet  third" in person.sees)


def test_no_color(sit: Callable[..., Person]) -> None:
    person = sit(NO_COLOR="1")
    person.until(lambda: "q quit" in person.sees)
    assert not re.search(rb"\x1b\[[0-9;]*m", person.raw)
