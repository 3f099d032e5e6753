"""Output of ranks that is in their logs already, and is searched and shown later.

A rank that prints much waits for one copy of its output, as under torchrun, rather than for three.
A console that is not a file (a terminal, a pipe) holds the ranks back, as without a launcher.
"""

from __future__ import annotations

import time
from collections import deque
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
    def close(self) -> None: ...


class Backlog:
    """In the order in which it arrived, for all ranks of an attempt."""

    def __init__(self) -> None:
        # (output, begin, end) in its log; end None: the output is complete
        self._parts: deque[tuple[Source, int, int | None]] = deque()
        self._bytes = 0
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
        self._bytes += end - begin
        if end - begin >= LARGE_BYTES:
            self._busy_at = time.monotonic()
        if self._parts and self._parts[-1][0] is source and self._parts[-1][2] == begin:
            begin = self._parts.pop()[1]
        self._parts.append((source, begin, end))
        while self._bytes > MOST_BYTES and not source.unlimited:
            self._show_slice()

    def close(self, source: Source) -> None:
        """Close it as soon as all of it has been shown."""
        if self._parts:
            self._parts.append((source, 0, None))
        else:
            source.close()

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
        source, begin, end = self._parts.popleft()
        if end is None:
            source.close()
            return
        data = source.read_back(begin, min(SLICE_BYTES, end - begin))
        if not data:  # somebody has truncated the log
            self._bytes -= end - begin
            return
        if begin + len(data) < end:  # a message of the launcher may follow: whole lines
            data = data[: data.rfind(b"\n") + 1] or data
            self._parts.appendleft((source, begin + len(data), end))
        self._bytes -= len(data)
        source.take(data, begin)
