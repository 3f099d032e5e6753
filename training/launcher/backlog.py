"""Output of ranks that is in their logs already, and is searched and shown later.

A rank that prints much waits for one copy of its output, as under torchrun, rather than for three.
A console that is not a file (a terminal, a pipe) holds the ranks back, as without a launcher.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

LARGE_BYTES = 1 << 16  # a read of this size: the rank prints faster than the console gets it
BUSY_S = 0.05  # after such a read
SLICE_BYTES = 1 << 18  # shown at once: small enough for the cache of a core
MOST_BYTES = 1 << 24  # behind a terminal or a pipe
PASS_S = 0.02  # for showing, between two looks at the ranks
SIGN_OF_LIFE_S = 0.1  # a slice is shown this often while the ranks print


class Source(Protocol):
    unlimited: bool  # nothing is shown, or in a file

    def read_back(self, begin: int, count: int) -> bytes: ...
    def take(self, data: bytes, begin: int) -> None: ...


class Backlog:
    """In the order in which it arrived, for all ranks of an attempt."""

    def __init__(self) -> None:
        # (output, begin, end) in its log, or what is to be done after that
        self._parts: deque[tuple[Source, int, int] | Callable[[], None]] = deque()
        self.waiting = 0  # bytes
        self._shown_at = self._busy_at = 0.0

    def patience_s(self, most_s: float) -> float:
        """How long to wait for output: not while there is something to show."""
        if not self._parts:
            return most_s
        return BUSY_S if self._busy() else 0.0

    def _busy(self) -> bool:
        """Are ranks printing? They must not wait."""
        return time.monotonic() - self._busy_at < BUSY_S

    @property
    def empty(self) -> bool:
        return not self._parts

    def defers(self, count: int) -> bool:
        """Is a piece of this size shown later? Everything is that comes after one."""
        return bool(self._parts) or count >= LARGE_BYTES

    def add(self, source: Source, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of the source's log."""
        self.waiting += end - begin
        if end - begin >= LARGE_BYTES:
            self._busy_at = time.monotonic()
        last = self._parts[-1] if self._parts else None
        if isinstance(last, tuple) and last[0] is source and last[2] == begin:
            begin = last[1]
            self._parts.pop()
        self._parts.append((source, begin, end))
        while self.waiting > MOST_BYTES and not source.unlimited:
            self._show_slice()

    def then(self, act: Callable[[], None]) -> None:
        """Act when all that is here now has been shown."""
        if self._parts:
            self._parts.append(act)
        else:
            act()

    def catch_up(self) -> None:
        """Show a part of it."""
        now, busy = time.monotonic(), self._busy()
        if busy and now - self._shown_at < SIGN_OF_LIFE_S:
            return
        while self._parts:
            self._show_slice()
            self._shown_at = time.monotonic()
            if busy or self._shown_at - now > PASS_S:
                return

    def show_all(self) -> None:
        while self._parts:
            self._show_slice()

    def _show_slice(self) -> None:
        part = self._parts.popleft()
        if not isinstance(part, tuple):
            part()
            return
        source, begin, end = part
        data = source.read_back(begin, min(SLICE_BYTES, end - begin))
        if not data:  # the user has truncated the log
            self.waiting -= end - begin
            return
        if begin + len(data) < end:  # a message of the launcher may follow: whole lines
            data = data[: data.rfind(b"\n") + 1] or data
            self._parts.appendleft((source, begin + len(data), end))
        self.waiting -= len(data)
        source.take(data, begin)
