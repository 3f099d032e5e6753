"""Signals that ask the supervisor to stop. Between two attempts they count as much as while ranks
run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from training.core.errors import Exit
from training.host import process


def code(number: int) -> Exit:
    """What the launcher's exit status says when this signal has ended the run."""
    return Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED


# A rank that leaves with such a status was asked to stop: by a signal like this one.
SIGNALS = {int(Exit.PREEMPTED): signal.SIGTERM, int(Exit.INTERRUPTED): signal.SIGINT}


def name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """While it is entered, such signals become bytes in a pipe (`fd`), where none is lost and none
    comes in the middle of something. It may be entered again inside. Who was asked to stop does
    that afterwards, however often he is asked."""

    def __init__(self) -> None:
        self.fd = self._writer = self._previous = -1
        self._depth = 0
        self._asked = self._ends_work = False

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1:
            self.fd, self._writer = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._writer, False)
            self._previous = signal.set_wakeup_fd(self._writer)
            self._before = {
                number: signal.signal(number, self._note) for number in process.STOP_SIGNALS
            }
        return self

    def __exit__(self, *failure: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._asked else handler)
        signal.set_wakeup_fd(self._previous)
        os.close(self.fd)
        os.close(self._writer)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
        if self._ends_work:
            self._ends_work = False
            raise KeyboardInterrupt

    def read(self) -> list[int]:
        """The signals that have come since the last time."""
        try:
            arrived = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        return [number for number in arrived if number in process.STOP_SIGNALS]

    def wait(self, seconds: float) -> int | None:
        """The signal that has come, or comes within so many seconds."""
        end = time.monotonic() + seconds
        while True:
            select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            if numbers := self.read():
                return numbers[0]
            if time.monotonic() >= end:
                return None

    def unless_asked(self, work: Callable[[], object]) -> None:
        """Work that may take minutes: a wish ends it, and is still there to be read."""
        self._ends_work = True
        try:
            with contextlib.suppress(KeyboardInterrupt):
                work()
        finally:
            self._ends_work = False
