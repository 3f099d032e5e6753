"""User at a real pseudo-terminal who watches a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pexpect
import pyte

from tests.unit.monitor_runs import COMMAND, PATIENCE_S
from training.monitor import terminal

BEGIN, END = terminal.BEGIN.encode(), terminal.END_OF_SCREEN.encode()


class Person:
    """The monitor in a terminal of 80 × 24; `sees` is what is on the screen."""

    def __init__(
        self, *argv: str, rows: int = 24, columns: int = 80, command: str = COMMAND, **environ: str
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = self._unseen = b""
        clean = (
            {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
            | {"TERM": "xterm-256color"}
            | environ
        )
        self.child = pexpect.spawn(command, list(argv), dimensions=(rows, columns), env=clean)

    @property
    def sees(self) -> str:
        return "\n".join(self.screen.display)

    def _feed(self, chunk: bytes) -> None:
        """Shows only complete screens, as a terminal with synchronized output does."""
        self.raw += chunk
        pending = self._unseen + chunk
        begun = pending.rfind(BEGIN)
        cut = begun if begun > pending.rfind(END) else len(pending)
        cut -= next(
            (
                n
                for n in range(len(BEGIN) - 1, 0, -1)
                if cut == len(pending) and pending.endswith(BEGIN[:n])
            ),
            0,
        )
        self.stream.feed(pending[:cut])
        self._unseen = pending[cut:]

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, f"not shown in time:\n{self.sees}"
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(), f"ended before it was shown:\n{self.sees}"
                return
            self._feed(chunk)

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def left(self) -> tuple[int | None, int | None]:
        """(exit status, signal), once all output is read."""
        while True:
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=PATIENCE_S)
            except pexpect.EOF:
                break
            self._feed(chunk)
        self.stream.feed(self._unseen)  # it was killed while it painted
        self.child.close()
        return self.child.exitstatus, self.child.signalstatus
