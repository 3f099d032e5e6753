"""The launcher's output to a terminal that shows nothing, and to a reader that reads nothing."""

from __future__ import annotations

import os
import pty
import signal
import termios
import threading
import time
import tty
from collections.abc import Iterator

import pytest

from training.core import console
from training.core.console import Console
from training.launcher import stop_signals


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PATIENCE_S", 0.1)
    monkeypatch.setattr(console, "_POLL_S", 0.01)
    monkeypatch.setattr(console, "_hurry_at", None)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The user's side, and the program's."""
    user, program = pty.openpty()
    tty.setraw(program)  # lines end as they were written
    yield user, program
    os.close(user)
    os.close(program)


def read(user: int, end: bytes) -> bytes:
    text = b""
    while not text.endswith(end):
        text += os.read(user, 1 << 16)
    return text


def test_a_stopped_terminal_holds_nothing_back_and_shows_what_it_missed(
    terminal: tuple[int, int],
) -> None:
    user, program = terminal
    shown = Console(program)
    shown.write(b"one\n")
    assert read(user, b"one\n") == b"one\n"
    termios.tcflow(program, termios.TCOOFF)  # Ctrl-S
    shown.write(b"two\n")
    termios.tcflow(program, termios.TCOON)  # Ctrl-Q
    shown.write(b"three\n")
    assert read(user, b"three\n") == b"two\nthree\n"


def test_of_much_that_was_missed_the_end_is_shown(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "KEPT_BYTES", 100)
    user, program = terminal
    shown = Console(program)
    termios.tcflow(program, termios.TCOOFF)
    for number in range(1000):
        shown.write(b"line %d\n" % number)
    termios.tcflow(program, termios.TCOON)
    shown.finish()
    lines = read(user, b"line 999\n").splitlines()
    assert b"kB" in lines[1]
    assert lines[2:] == [b"line %d" % number for number in range(1000 - len(lines[2:]), 1000)]
    assert 5 < len(lines) < 30


def test_a_terminal_that_is_slow_loses_nothing(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PATIENCE_S", 60.0)
    monkeypatch.setattr(console, "MOST_S", 60.0)
    user, program = terminal
    data = bytes(range(32, 127)) * 2000
    writer = threading.Thread(target=Console(program).write, args=(data + b"end",))
    writer.start()
    assert read(user, b"end") == data + b"end"
    writer.join()


def test_the_flags_of_the_terminal_stay_as_they_are(terminal: tuple[int, int]) -> None:
    _, program = terminal
    Console(program).write(b"one")
    assert os.get_blocking(program)


def test_the_end_is_shown_though_the_terminal_stops_again(terminal: tuple[int, int]) -> None:
    user, program = terminal
    shown, text = Console(program), b"".join(b"line %d\n" % n for n in range(5000))
    termios.tcflow(program, termios.TCOOFF)
    shown.write(text)
    termios.tcflow(program, termios.TCOON)
    ends = threading.Thread(target=shown.finish)  # more than a terminal holds at once
    ends.start()
    ends.join(0.5)
    assert ends.is_alive()
    assert read(user, b"line 4999\n").endswith(text[-1000:])
    ends.join(60)
    assert not ends.is_alive() and not shown.frozen


def test_the_launcher_waits_for_its_terminal_until_a_signal(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    shown = Console(terminal[1])
    monkeypatch.setattr(console, "of", lambda fd: shown)
    stop_signals.show_the_rest()  # at once: it has missed nothing
    termios.tcflow(terminal[1], termios.TCOOFF)
    shown.write(b"the end\n")
    stops = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    begun = time.monotonic()
    stops.start()
    stop_signals.show_the_rest()
    assert 0.3 < time.monotonic() - begun < 30
    assert shown.frozen and signal.getsignal(signal.SIGTERM) == before


def test_a_pipe_is_waited_for_until_a_stop_is_requested() -> None:
    reader, writer = os.pipe()
    shown, data = Console(writer), b"y" * (1 << 20)  # more than a pipe holds
    waits = threading.Thread(target=shown.write, args=(data,))
    waits.start()
    waits.join(0.5)
    assert waits.is_alive()
    received = os.read(reader, 1 << 16)
    console.hurry()
    waits.join(60)
    assert not waits.is_alive()
    os.set_blocking(reader, False)
    while part := _part(reader):
        received += part
    assert set(received) == {ord("y")} and len(received) < len(data)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        shown.write(b"z")
    os.close(writer)


def _part(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""
