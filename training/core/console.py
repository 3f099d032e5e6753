"""Standard output and error of a launcher. A slow reader holds it back, as any program, but a
terminal that shows nothing does not: after Ctrl-S, or in a hung ssh session, the run continues.
When the terminal shows text again, it shows the last part of what it has missed; the logs have
everything.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import stat
import threading
import time

from training.core.messages import msg
from training.core.units import duration, size

PATIENCE_S = 5.0  # without progress
MOST_S = 8.0  # for one piece of text: other machines must not lose this one
KEPT_BYTES = 1 << 16  # of what a terminal has missed
KEPT_OF_A_PIPE = 1 << 26  # which may carry data
_POLL_S = 0.2

_hurry_at: float | None = None


def hurry() -> None:
    """A stop was requested: from now on every reader is waited for at most PATIENCE_S."""
    global _hurry_at
    _hurry_at = _hurry_at or time.monotonic()


@functools.cache
def of(fd: int) -> Console:
    """The console behind this descriptor of the process, 1 or 2; often they are the same one."""
    with contextlib.suppress(OSError):  # one of them is closed
        if fd != 2 and os.path.samestat(os.fstat(fd), os.fstat(2)):
            return of(2)
    return Console(fd)


def frozen() -> list[Console]:
    """Those that have missed something."""
    return [one for one in {of(1), of(2)} if one.frozen]


class Console:
    def __init__(self, fd: int) -> None:
        self._fd, self._terminal = fd, os.isatty(fd)
        self._out = self._without_waiting()
        self._lock = threading.Lock()
        self._frozen_at: float | None = None
        self._missed = bytearray()  # the end of what was written since then
        self._missed_bytes = 0

    def _without_waiting(self) -> int:
        """A descriptor of our own whose writes never block: a flag of the given one would be set
        for all programs that share it. The given one where there is none: of a file, a socket,
        another user's terminal."""
        with contextlib.suppress(OSError):
            if self._terminal or stat.S_ISFIFO(os.fstat(self._fd).st_mode):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                return os.open(f"/proc/self/fd/{self._fd}", flags)
        return self._fd

    def write(self, data: bytes) -> None:
        """Raises OSError: the reader is gone."""
        with self._lock:
            if self._frozen_at is None:
                self._write(data)
            elif self._writable(0):
                self._write(self._caught_up() + data)
            else:
                self._miss(data)

    @property
    def frozen(self) -> bool:
        return self._frozen_at is not None

    def finish(self) -> None:
        """Wait until it shows text again, and show what it has missed."""
        with self._lock:
            while self._frozen_at is not None and self._waited(math.inf):
                self._write(self._caught_up())

    def _write(self, data: bytes) -> None:
        rest, most_s = memoryview(data), PATIENCE_S if self._terminal else math.inf
        end = time.monotonic() + (MOST_S if self._terminal else math.inf)
        while rest:
            try:
                rest = rest[os.write(self._out, rest) :]
            except BlockingIOError:
                if not self._waited(min(most_s, end - time.monotonic())):
                    self._frozen_at = time.monotonic()
                    self._miss(rest)
                    return

    def _waited(self, most_s: float) -> bool:
        """Whether the reader takes more."""
        begun = time.monotonic()
        while not self._writable(_POLL_S):
            now = time.monotonic()
            if now - begun > most_s:
                return False
            if _hurry_at is not None and now - max(begun, _hurry_at) > PATIENCE_S:
                return False
        return True

    def _writable(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._out, select.POLLOUT)
        return bool(waiting.poll(1000 * seconds))

    def _miss(self, data: bytes | memoryview) -> None:
        self._missed += data
        self._missed_bytes += len(data)
        most = KEPT_BYTES if self._terminal else KEPT_OF_A_PIPE
        if len(self._missed) > 2 * most:
            del self._missed[:-most]

    def _caught_up(self) -> bytes:
        """What the reader has missed: how much, and its last lines."""
        assert self._frozen_at is not None
        text, frozen_s = bytes(self._missed), time.monotonic() - self._frozen_at
        if (lost := self._missed_bytes - len(text)) and self._terminal:
            begin = text.find(b"\n") + 1
            note = msg(
                "core.console.not_shown", seconds=duration(frozen_s), size=size(lost + begin)
            )
            text = f"\n{note}\n".encode() + text[begin:]
        self._frozen_at, self._missed_bytes = None, 0
        self._missed.clear()
        return text
