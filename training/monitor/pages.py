"""Pages of the live view: overview, help, log, GPU details, diagnosis, and the table of all
runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from training.core.messages import msg
from training.core.project import ROOT
from training.core.tail import tail
from training.monitor import run_list, tables, term_text
from training.monitor import screen as overview
from training.monitor.screen import View, finish
from training.monitor.sections import place
from training.monitor.term_text import Line
from training.monitor.terminal import DOWN, END, HOME, PAGE_DOWN, PAGE_UP, UP

if TYPE_CHECKING:
    from training.core.contracts.state import RunsState, RunState

LOG_BYTES = 1 << 20  # of the end of a log that can be scrolled through

Shown_contra = TypeVar("Shown_contra", "RunState", "RunsState", contravariant=True)


class ScreenPage(ABC, Generic[Shown_contra]):
    """`lines` draws the page; `key` returns whether it handled the key."""

    @abstractmethod
    def lines(self, state: Shown_contra, view: View) -> list[str]: ...

    def key(self, key: str, state: Shown_contra) -> bool:
        return False

    def close(self) -> None:  # most have nothing to close
        pass


class Overview(ScreenPage["RunState"]):
    def lines(self, state: RunState, view: View) -> list[str]:
        return overview.screen(state, view)


class Scrolled(ScreenPage["RunState"]):
    """Scrollable text; starts at its end if `from_end`."""

    from_end = False

    def __init__(self) -> None:
        # rows above the screen; None: follows the end
        self._above: int | None = None if self.from_end else 0
        self._rows = self._most = 0

    @abstractmethod
    def title(self, state: RunState) -> Line: ...

    @abstractmethod
    def text(self, state: RunState) -> list[Line]: ...

    def lines(self, state: RunState, view: View) -> list[str]:
        text = [row for line in self.text(state) for row in term_text.wrap(line, view.width, 2)]
        self._rows = max(1, view.height - 2 - bool(view.footer))
        self._most = max(0, len(text) - self._rows)
        above = self._most if self._above is None else min(self._above, self._most)
        last = min(len(text), above + self._rows)
        here = msg("monitor.page.lines", first=above + 1, last=last, count=len(text))
        shown = [
            term_text.sides(self.title(state), [("  " + here if text else "", "dim")], view.width),
            [],
            *text[above : above + self._rows],
        ]
        return finish(shown, view)

    def key(self, key: str, state: RunState) -> bool:
        above = self._most if self._above is None else self._above
        moves = {
            UP: above - 1,
            DOWN: above + 1,
            PAGE_UP: above - self._rows,
            PAGE_DOWN: above + self._rows,
            HOME: 0,
            END: self._most,
        }
        if key not in moves:
            return False
        above = max(0, min(self._most, moves[key]))
        self._above = None if self.from_end and above == self._most else above
        return True


class Help(Scrolled):
    def title(self, state: RunState) -> Line:
        return [(msg("monitor.page.keys"), "bold")]

    def text(self, state: RunState) -> list[Line]:
        return [[(line, "")] for line in msg("monitor.page.help").splitlines()]


class Log(Scrolled):
    from_end = True

    def title(self, state: RunState) -> Line:
        return [
            (msg("monitor.page.log") + "  ", "bold"),
            (place(state["log"]["file"] or msg("monitor.page.no_log"), 60), "dim"),
        ]

    def text(self, state: RunState) -> list[Line]:
        file = state["log"]["file"]
        return [
            [(term_text.clean(line), "")]
            for line in (tail(Path(file), 1 << 30, most_bytes=LOG_BYTES) if file else [])
        ]


class GpuDetails(Scrolled):
    def title(self, state: RunState) -> Line:
        return [
            (msg("monitor.page.gpus"), "bold"),
            (f"  {term_text.clean(state['gpus_reason'])}", "dim"),
        ]

    def text(self, state: RunState) -> list[Line]:
        return [
            line for gpu in state["gpus"] for line in [*tables.gpu_details(gpu, state["ranks"]), []]
        ]


class Diagnosis(Scrolled):
    """Output of `./duet diagnose` for this run, in a child process: logs may be large."""

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._target = state["run"]["dir"] or state["log"]["file"]
        self._started = time.monotonic()
        self._read = b""
        self._output: list[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        command = [
            sys.executable,
            str(ROOT / "lib/run_module.py"),
            "training.cli.diagnose",
            str(self._target),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # not a file: the disk may be full
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # too many processes
            text = msg("monitor.page.cannot_start", error=error.strerror)
            self._output = text.splitlines()
            return
        assert self._process.stdout
        self._out = self._process.stdout
        os.set_blocking(self._out.fileno(), False)

    def title(self, state: RunState) -> Line:
        return [
            (msg("monitor.page.diagnosis") + "  ", "bold"),
            (place(str(self._target), 60), "dim"),
        ]

    def text(self, state: RunState) -> list[Line]:
        if self._output is None and self._process:
            ended = self._process.poll() is not None
            self._read += self._out.read() or b""  # None: nothing yet
            if ended:
                text = self._read.decode("utf-8", "replace")
                self._output = text.splitlines() or [msg("monitor.page.no_output")]
        if self._output is None:
            waited = time.monotonic() - self._started
            return [[(msg("monitor.page.reading", seconds=waited), "dim")]]
        return [[(term_text.clean(line), "")] for line in self._output]

    @property
    def waits(self) -> bool:
        return self._output is None

    def close(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._out.close()


class Runs(ScreenPage["RunsState"]):
    """The table of all runs. The mark is kept by folder, since rows change."""

    def __init__(self, marked: str = "") -> None:
        self.marked = marked
        self._rows = 1

    def lines(self, state: RunsState, view: View) -> list[str]:
        self._rows = run_list.rows_for(state, view)
        place = self._place(state)
        self.marked = state["runs"][place]["run"]["dir"] or "" if state["runs"] else ""
        return run_list.screen(state, view, place)

    def key(self, key: str, state: RunsState) -> bool:
        last, place = len(state["runs"]) - 1, self._place(state)
        moves = {
            UP: place - 1,
            DOWN: place + 1,
            PAGE_UP: place - self._rows,
            PAGE_DOWN: place + self._rows,
            HOME: 0,
            END: last,
        }
        if key not in moves or not state["runs"]:
            return False
        self.marked = state["runs"][max(0, min(last, moves[key]))]["run"]["dir"] or ""
        return True

    def _place(self, state: RunsState) -> int:
        return next(
            (n for n, run in enumerate(state["runs"]) if run["run"]["dir"] == self.marked), 0
        )
