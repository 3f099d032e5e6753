"""The live view on a terminal: repaint, keys, signals. However it is left, the terminal is as it was before.

It draws on the alternate screen, so what stood on the terminal comes back; the last screen of an ended run stays below it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType

from training.monitor import draw
from training.monitor.screen import View, one_line, screen
from training.monitor.state import ENDED, State, Watch

# Before leaving, a new line at the bottom: a terminal without an alternate screen goes on below what was drawn.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[999;1H\r\n\x1b[?25h\x1b[?1049l"
# A supervisor that is still there after the end may be writing its last lines, or about to start the ranks again.
LAST_WORDS_S, LAST_LOOKS_S = 2.0, 0.2
# The first screen does not wait for a slow GPU driver, and has no CPU use yet: the second one comes soon.
FIRST_PATIENCE_S, SECOND_LOOK_S = 0.05, 1.0
NICE = 5  # the run's processes go first


class Quit(Exception):
    """The user pressed q, or the terminal is gone."""


def live(watch: Watch, interval_s: float, ascii_only: bool) -> None:
    """Paint until the run has ended or the user leaves. Raises KeyboardInterrupt (Ctrl-C), SystemExit (TERM, HUP)."""
    with contextlib.suppress(Quit):
        state = watch.read(FIRST_PATIENCE_S)
        ended: float | None = None  # when the end was first seen
        with Terminal() as terminal:
            terminal.paint(state, interval_s, ascii_only)
            os.nice(NICE)
            wait_s = min(interval_s, SECOND_LOOK_S)
            while True:
                ended = (ended or time.monotonic()) if state["run"]["state"] in ENDED else None
                if ended and final(state, ended):
                    break
                until = time.monotonic() + (LAST_LOOKS_S if ended else wait_s)
                while terminal.wait(until):
                    terminal.paint(state, interval_s, ascii_only)
                state, wait_s = watch.read(), interval_s
                terminal.paint(state, interval_s, ascii_only)
        # One row is left for the prompt.
        width, height = size()
        print_screen(screen(state, View(width, height - 1, terminal.colour, ascii_only)))


def lines(watch: Watch, interval_s: float, ascii_only: bool) -> None:
    """Output that is no terminal: one plain line a look."""
    ended: float | None = None
    while True:
        state = watch.read()
        ended = (ended or time.monotonic()) if state["run"]["state"] in ENDED else None
        last = ended is not None and final(state, ended)
        if last or not ended:
            line = one_line(state)
            print(draw.to_ascii(line) if ascii_only else line, flush=True)
        if last:
            return
        time.sleep(LAST_LOOKS_S if ended else interval_s)


def final(state: State, ended: float) -> bool:
    """Whether nothing more is to come of a run whose end was first seen at `ended` (monotonic)."""
    return not state["run"]["supervisor_alive"] or time.monotonic() - ended > LAST_WORDS_S


def print_screen(text: list[str]) -> None:
    print("\n".join(line.rstrip() for line in text), flush=True)


def size(fallback: tuple[int, int] = (80, 24)) -> tuple[int, int]:
    """(columns, rows) of the terminal now; the variables COLUMNS and LINES do not follow a resize."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return fallback
    return columns or fallback[0], rows or fallback[1]


class Terminal:
    """No echo, no cursor, alternate screen; signals wake `wait`."""

    def __init__(self) -> None:
        self.colour = not os.environ.get("NO_COLOR")
        self._keys = sys.stdin is not None and sys.stdin.isatty()
        self._out = sys.stdout.fileno()
        self._modes: list[object] | None = None
        self._wake, self._wake_write = os.pipe()

    def __enter__(self) -> Terminal:
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been inherited as ignored
        signal.signal(signal.SIGWINCH, lambda number, frame: None)
        signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._take()
        except BaseException:  # a signal in just this moment
            self._give_back()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)  # nothing may come between and leave the cursor hidden
        self._give_back()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _take(self) -> None:
        if self._keys:
            self._modes = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin, termios.TCSANOW)  # single keys; Ctrl-C stays a signal
        self._write(ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._write(LEAVE)
        if self._modes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._modes)  # type: ignore[arg-type]

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal, and fg brings ours back."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _write(self, text: str) -> None:
        # Not through sys.stdout: its buffer can not be entered again by a signal handler.
        rest = text.encode(sys.stdout.encoding or "ascii", "replace")
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def paint(self, state: State, interval_s: float, ascii_only: bool) -> None:
        width, height = size()
        footer = f"q leaves (the run goes on)   every {interval_s:g} s" if self._keys else f"Ctrl-C leaves   every {interval_s:g} s"
        text = screen(state, View(width, height, self.colour, ascii_only, footer))
        # Each line at its own row and erased first: no scrolling, nothing old left, no line break at the last column.
        rows = "".join(f"\x1b[{row};1H\x1b[2K{line}" for row, line in enumerate(text, start=1))
        try:
            self._write(rows + "\x1b[J")
        except OSError:
            raise Quit from None

    def wait(self, until: float) -> bool:
        """Wait for that time; True when the screen must be painted again before. Raises Quit."""
        while (left := until - time.monotonic()) > 0:
            watched = [self._wake, *([sys.stdin.fileno()] if self._keys else [])]
            ready, _, _ = select.select(watched, [], [], left)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 512)
                return True
            if ready:
                try:
                    keys = os.read(sys.stdin.fileno(), 64)
                except OSError:
                    keys = b""
                if not keys or b"q" in keys.lower():
                    raise Quit
        return False


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
