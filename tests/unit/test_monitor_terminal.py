"""The live view through a real terminal, as a person sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pexpect
import pyte
import pytest

from tests.unit.monitor_runs import COMMAND, PATIENCE_S, Made

# A real terminal


class Person:
    """Sits at a terminal of 80 × 24 and sees what a person would see."""

    def __init__(self, *argv: str, rows: int = 24, columns: int = 80, **environ: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"} | environ
        self.child = pexpect.spawn(COMMAND, list(argv), dimensions=(rows, columns), env=clean)

    @property
    def sees(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, f"not seen in time:\n{self.sees}"
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(), f"ended before that was seen:\n{self.sees}"
                return
            self.raw += chunk
            self.stream.feed(chunk)

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def left(self) -> tuple[int | None, int | None]:
        """(exit status, signal) after the end of all output."""
        while True:
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=PATIENCE_S)
            except pexpect.EOF:
                break
            self.raw += chunk
            self.stream.feed(chunk)
        self.child.close()
        return self.child.exitstatus, self.child.signalstatus


@pytest.fixture
def sit(made: Made) -> Iterator[Callable[..., Person]]:
    """Watches a running run; nobody is left sitting there at the end."""
    made.supervisor(os.getpid()).steps(100).beats()
    people: list[Person] = []

    def begin(*argv: str, **environ: str) -> Person:
        people.append(Person(f"--run={made.run.path}", "--interval=0.2", *argv, **environ))
        return people[-1]

    yield begin
    for person in people:
        person.child.close(force=True)
        assert not person.child.isalive()


def test_live_view_as_a_person_sees_it(made: Made, sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    assert person.screen.cursor.hidden
    rows = person.screen.display
    assert rows[0].startswith("Duet  small run") and re.search(r"RUNNING  \d\d:\d\d:\d\d$", rows[0])
    assert "step 100 of 400  25.0 %" in rows[2] and rows[2].startswith("█")
    assert re.match(r" +0 +\d+ +7 +[\d.]+ s  step 7: forward", next(r for r in rows if "forward" in r))
    assert rows[23].startswith("q leaves")
    assert person.screen.buffer[0][len("Duet  ")].bold and any(cell.fg != "default" for cell in person.screen.buffer[0].values())

    made.step(101, 1.2345)  # news appear by themselves
    person.until(lambda: "loss 1.2345" in person.sees and "step 101 of 400" in person.sees)
    person.until(lambda: "CPU load" not in person.sees)  # and CPU use from the second look on

    person.resize(40, 120)
    person.until(lambda: person.screen.display[39].startswith("q leaves"))
    assert re.search(r"RUNNING  \d\d:\d\d:\d\d$", person.screen.display[0]) and len(person.screen.display[0]) == 120
    assert person.sees.count("q leaves") == 1 and "(ends " in person.sees

    person.resize(12, 50)
    person.until(lambda: person.screen.display[0].startswith("Duet  ") and person.screen.display[11].startswith("q leaves"))
    assert "RUNNING" in person.screen.display[0] and person.sees.count("Duet  ") == 1

    person.child.send("x")  # any other key does nothing
    person.child.send("q")
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert person.raw.index(b"\x1b[?1049h") < person.raw.index(b"\x1b[?1049l")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_give_the_terminal_back(sit: Callable[..., Person], number: int, status: int) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    before = person.screen.cursor.hidden
    person.child.kill(number)
    assert person.left() == (status, None)
    assert before and not person.screen.cursor.hidden and b"Traceback" not in person.raw


def test_ctrl_c_and_ctrl_z_on_the_keyboard(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    person.child.sendcontrol("z")
    person.until(lambda: not person.screen.cursor.hidden)  # the shell would have its terminal again
    person.child.kill(signal.SIGCONT)
    person.until(lambda: person.screen.cursor.hidden and person.screen.display[23].startswith("q leaves"))
    person.child.sendcontrol("c")
    assert person.left() == (130, None)
    assert not person.screen.cursor.hidden


def test_ends_by_itself_with_a_last_screen(made: Made, sit: Callable[..., Person]) -> None:
    rank = subprocess.Popen(["sleep", "600"])
    try:
        made.supervisor(rank.pid)
        person = sit("--ascii")
        person.until(lambda: "RUNNING" in person.sees)
        made.summary()
    finally:
        rank.kill()
        rank.wait()
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert "FINISHED" in person.screen.display[0] and "done: loss" in person.sees and person.sees.isascii()


def test_no_color(sit: Callable[..., Person]) -> None:
    person = sit(NO_COLOR="1")
    person.until(lambda: "q leaves" in person.sees)
    assert not re.search(rb"\x1b\[[0-9;]*m", person.raw)
