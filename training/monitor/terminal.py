"""Terminal modes, signals, keys and painting.

Draws on the alternate screen, and restores modes and screen on every exit.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType

# A newline at the bottom before leaving: a terminal without an alternate screen continues below.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?2026l\x1b[999;1H\r\n\x1b[?25h\x1b[?1049l"
# Synchronized output: a terminal that supports it shows only complete screens.
BEGIN, END_OF_SCREEN = "\x1b[?2026h", "\x1b[?2026l"
RESIZED, ESCAPE, UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END, RETURN = (
    "resized",
    "escape",
    "up",
    "down",
    "page up",
    "page down",
    "home",
    "end",
    "return",
)
GIVE_UP_S = 1.0
_SEQUENCES = {
    b"\x1b[A": UP,
    b"\x1bOA": UP,
    b"\x1b[B": DOWN,
    b"\x1bOB": DOWN,
    b"\x1b[5~": PAGE_UP,
    b"\x1b[6~": PAGE_DOWN,
}
_SEQUENCES |= {
    b"\x1b[H": HOME,
    b"\x1bOH": HOME,
    b"\x1b[1~": HOME,
    b"\x1b[F": END,
    b"\x1bOF": END,
    b"\x1b[4~": END,
}
_SEQUENCES |= {b"\x1b": ESCAPE, b"\r": RETURN, b"\n": RETURN, b" ": PAGE_DOWN, b"k": UP, b"j": DOWN}
# One key: a control sequence (with a second bracket on the Linux console), a keypad key, Escape, or
# a character.
_KEY = re.compile(
    rb"\x1b\[\[?[0-?]*[ -/]*[@-~]|\x1bO[@-~]|\x1b(?=\x1b|$)|\x1b[^\[O]|[^\x1b]", re.DOTALL
)
_UNFINISHED = re.compile(rb"\x1b(?:\[\[?[0-?]*[ -/]*|O)?$")
REST_OF_A_KEY_S = 0.1  # a sequence may arrive in pieces; nothing follows a lone Escape


class Quit(Exception):
    """The terminal is gone."""


def print_screen(text: list[str]) -> None:
    print("\n".join(line.rstrip() for line in text), flush=True)


def size(fallback: tuple[int, int] = (80, 24)) -> tuple[int, int]:
    """(columns, rows) of the terminal now; the variables COLUMNS and LINES do not follow a
    resize."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return fallback
    return columns or fallback[0], rows or fallback[1]


def rewraps() -> bool:
    """Whether the terminal rewraps its rows when it becomes narrower, as tmux, GNU screen and most
    others do; xterm, PuTTY, st and the console cut them. Over ssh the name may be another one's."""
    if "TMUX" in os.environ or "STY" in os.environ:
        return True
    cuts = os.environ.get("TERM", "").startswith(("linux", "putty", "st-"))
    return not cuts and "XTERM_VERSION" not in os.environ


def names_of(keys: bytes) -> list[str]:
    """Names of the pressed keys: lower-case characters, or names like "page up"."""
    return [_SEQUENCES.get(key) or key.decode("latin-1").lower() for key in _KEY.findall(keys)]


def unfinished(keys: bytes) -> bool:
    """Whether the input ends in the middle of a key sequence."""
    return _UNFINISHED.search(keys) is not None


class Terminal:
    """No echo, no cursor, alternate screen; signals wake `wait`."""

    def __init__(self) -> None:
        self.colour = not os.environ.get("NO_COLOR")
        self.has_keys = sys.stdin is not None and sys.stdin.isatty()
        self._out = sys.stdout.fileno()
        self._modes: list[object] | None = None
        self._wake, self._wake_write = os.pipe()

    def __enter__(self) -> Terminal:
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        # it may have been inherited as ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGWINCH, lambda number, frame: None)
        signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._take()
        except BaseException:  # a signal at this moment
            self._give_back()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            # a signal here would leave the cursor hidden
            signal.signal(number, signal.SIG_IGN)
        self._give_back()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _take(self) -> None:
        if self.has_keys:
            self._modes = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin, termios.TCSANOW)  # single keys; Ctrl-C stays a signal
        self._write(ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            # or stopped by Ctrl-S, or on a dead connection
            if select.select([], [self._out], [], GIVE_UP_S)[1]:
                self._write(LEAVE)
        if self._modes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._modes)  # type: ignore[arg-type]

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: returns the terminal to the shell until `fg`."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _write(self, text: str) -> None:
        # Not through sys.stdout, whose buffer is not reentrant: signal handlers write too.
        rest = text.encode(sys.stdout.encoding or "ascii", "replace")
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def paint(self, text: list[str]) -> None:
        """Raises Quit."""
        # Each row is addressed and erased first: no scrolling, no remains, no wrap at the last
        # column.
        rows = "".join(f"\x1b[{row};1H\x1b[2K{line}" for row, line in enumerate(text, start=1))
        try:
            self._write(f"{BEGIN}{rows}\x1b[J{END_OF_SCREEN}")
        except OSError:
            raise Quit from None

    def wait(self, until: float) -> list[str]:
        """The next keys, [RESIZED] after a signal, or [] at the time `until` (monotonic). Raises
        Quit."""
        while (left := until - time.monotonic()) > 0:
            watched = [self._wake, *([sys.stdin.fileno()] if self.has_keys else [])]
            ready, _, _ = select.select(watched, [], [], left)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 512)
                return [RESIZED]
            if ready:
                keys = self._read()
                while (
                    unfinished(keys)
                    and select.select([sys.stdin.fileno()], [], [], REST_OF_A_KEY_S)[0]
                ):
                    keys += self._read()
                return names_of(keys)
        return []

    def _read(self) -> bytes:
        try:
            keys = os.read(sys.stdin.fileno(), 1024)
        except OSError:
            keys = b""
        if not keys:
            raise Quit
        return keys


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
