"""The live view, and its plain form for output that is not a terminal: one line per interval."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training.core import log, units
from training.core.errors import Exit
from training.core.messages import msg
from training.core.rundir import RunDir
from training.monitor import pages, term_text
from training.monitor.pages import Diagnosis, GpuDetails, Help, Log, Overview, Runs, ScreenPage
from training.monitor.run_status import ENDED, FAILED, FINISHED
from training.monitor.screen import View, one_line, screen
from training.monitor.state import RunWatch, StateSource
from training.monitor.terminal import ESCAPE, RESIZED, RETURN, Quit, Terminal, print_screen, size

if TYPE_CHECKING:
    from training.core.contracts.state import RunsState, RunState

# A supervisor that outlives the run may still write its last lines.
END_GRACE_S, END_POLL_S = 2.0, 0.2
# The first screen does not wait for a slow GPU driver and has no CPU use; the second follows soon.
FIRST_PATIENCE_S, SECOND_READ_S = 0.05, 1.0
NICE = 5  # the run's processes have priority
INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class Live:
    """Live view of one source. `newer`: returns the source that replaces one that has ended, or
    None."""

    def __init__(
        self, source: StateSource, interval_s: float, *, ascii_only: bool, follow_exit: bool
    ) -> None:
        self.source, self.interval_s, self.ascii_only, self.follow_exit = (
            source,
            interval_s,
            ascii_only,
            follow_exit,
        )
        self.newer: Callable[[StateSource], StateSource | None] = lambda shown: None
        self._first = source
        self._paused = False
        self._ended: float | None = None  # when the end was first seen
        self._unread = ""  # why the last read failed: a network file system may

    def go(self) -> int:
        """Runs until the user quits or, with follow_exit, the run has ended. Raises
        KeyboardInterrupt (Ctrl-C), SystemExit (TERM, HUP)."""
        self.state = self.source.read(FIRST_PATIENCE_S)
        # a page of runs or of one run, as `self.state` is
        self.page: ScreenPage[Any] = self._home()
        with contextlib.suppress(Quit), Terminal() as self.terminal:
            try:
                self._watch()
            finally:
                self.page.close()
        # the last screen stays on the terminal, less one row for the prompt
        if "run" in self.state and self.state["run"]["state"] in ENDED:
            width, height = size()
            print_screen(
                screen(self.state, View(width, height - 1, self.terminal.colour, self.ascii_only))
            )
        return (
            status(self.state)
            if self.follow_exit and "run" in self.state and self._over()
            else int(Exit.DONE)
        )

    def _watch(self) -> None:
        self._paint()
        os.nice(NICE)
        next_read = time.monotonic() + min(self.interval_s, SECOND_READ_S)
        while not (self.follow_exit and self._over()):
            waits = isinstance(self.page, Diagnosis) and self.page.waits
            hurry = waits or (self.follow_exit and self._ended is not None)
            for key in self.terminal.wait(
                min(next_read, time.monotonic() + END_POLL_S) if hurry else next_read
            ):
                was_paused = self._paused
                if not self._key(key):
                    return
                next_read = min(
                    next_read,
                    time.monotonic()
                    + (0.0 if was_paused and not self._paused else self.interval_s),
                )
            if time.monotonic() >= next_read or (hurry and not waits):
                if not self._paused:
                    self._read()
                next_read = time.monotonic() + self.interval_s
            self._paint()

    def _read(self) -> None:
        try:
            self.state, self._unread = self.source.read(), ""
        except OSError as error:
            self._unread = unread(error)
            return
        if "run" in self.state and self.state["run"]["state"] in ENDED:
            self._ended = self._ended or time.monotonic()
            if (
                final(self.state, self._ended)
                and not self.follow_exit
                and (newer := self.newer(self.source))
            ):
                self.source = self._first = newer
                self._ended = None
                self.state = self.source.read()
        else:
            self._ended = None

    def _over(self) -> bool:
        """Whether the run has ended and cannot restart: its supervisor is gone too."""
        if "runs" in self.state or self.state["run"]["state"] not in ENDED:
            return False
        self._ended = self._ended or time.monotonic()
        return not self.state["run"]["supervisor_alive"]

    @property
    def _runs(self) -> bool:
        return "runs" in self.state

    def _home(self) -> ScreenPage[Any]:
        return Runs() if self._runs else Overview()

    def _key(self, key: str) -> bool:
        """Handles a key; False to quit."""
        if key == "q":
            return False
        if key == RESIZED or self.page.key(key, self.state):
            return True
        if key == "p":
            self._paused = not self._paused
        elif key in "+=-_":
            self._change_interval(faster=key in "+=")
        elif key in ("?", "h"):
            self._show(Help)
        elif (
            key == RETURN
            and isinstance(self.page, Runs)
            and "runs" in self.state
            and self.state["runs"]
        ):
            self.source = RunWatch(RunDir(self.page.marked))
            self.state = self.source.read()
            self._turn(Overview())
        elif (
            key == ESCAPE
            and isinstance(self.page, Overview)
            and "run" in self.state
            and self.source is not self._first
        ):
            opened = self.state["run"]["dir"]
            self.source = self._first
            self.state = self.source.read()
            self._turn(Runs(opened or ""))
        elif key == ESCAPE:
            self._turn(self._home())
        elif "run" in self.state:
            if key == "l":
                self._show(Log)
            elif key == "g":
                self._show(GpuDetails)
            elif key == "a":
                self._turn(
                    Overview() if isinstance(self.page, Diagnosis) else Diagnosis(self.state)
                )
        return True

    def _show(self, kind: Callable[[], pages.Scrolled]) -> None:
        """Opens the page, or closes it if it is open."""
        self._turn(self._home() if type(self.page) is kind else kind())

    def _turn(self, page: ScreenPage[Any]) -> None:
        self.page.close()
        self.page = page

    def _change_interval(self, *, faster: bool) -> None:
        steps = [s for s in INTERVALS_S if (s < self.interval_s if faster else s > self.interval_s)]
        if steps:
            self.interval_s = steps[-1] if faster else steps[0]

    def _paint(self) -> None:
        width, height = size()
        footer = (
            msg("monitor.live.keys_of_runs", interval=self.interval_s)
            if self._runs
            else msg("monitor.live.keys", interval=self.interval_s)
        )
        if not isinstance(self.page, (Overview, Runs)):
            footer = msg("monitor.live.back") + "  " + footer
        if self._paused:
            since = units.clock(self.state["time_unix_s"])
            footer = msg("monitor.live.paused", since=since) + "  " + footer
        if not self.terminal.has_keys:
            footer = msg("monitor.live.no_keys", interval=self.interval_s)
        if self._unread:
            footer = self._unread + "  " + footer
        self.terminal.paint(
            self.page.lines(
                self.state, View(width, height, self.terminal.colour, self.ascii_only, footer)
            )
        )


def lines(
    source: StateSource, interval_s: float, *, ascii_only: bool, follow_exit: bool
) -> RunState | RunsState:
    """Prints one plain line for each active run and interval, or once for each run where none is
    active. Returns the last state once no run is active."""
    ended: float | None = None
    while True:
        try:
            state = source.read()
        except OSError as error:
            log.warning(unread(error))
            time.sleep(interval_s)
            continue
        runs = [state] if "run" in state else state["runs"]
        living = [r for r in runs if r["run"]["state"] not in ENDED]
        ended = (ended or time.monotonic()) if not living else None
        last = ended is not None and (
            "runs" in state
            or (not state["run"]["supervisor_alive"] if follow_exit else final(state, ended))
        )
        if last or not ended:
            shown = living or runs
            if not shown:
                print(msg("monitor.live.no_run"), flush=True)
            for one in shown:
                line = one_line(one)
                print(term_text.to_ascii(line) if ascii_only else line, flush=True)
        if last:
            return state
        time.sleep(END_POLL_S if ended else interval_s)


def unread(error: OSError) -> str:
    return msg("monitor.live.unread", error=term_text.clean(str(error.strerror or error)))


def final(state: RunState, ended: float) -> bool:
    """Whether a run is done for good whose end was first seen at `ended` (monotonic). A supervisor
    may restart failed ranks after a pause."""
    return not state["run"]["supervisor_alive"] or (
        state["run"]["state"] != FAILED and time.monotonic() - ended > END_GRACE_S
    )


def status(state: RunState) -> int:
    """Exit status of a run that has ended; where it is unknown, that of a failed run."""
    code = state["run"]["exit_code"]
    if code is not None:
        return int(code)
    return int(Exit.DONE if state["run"]["state"] == FINISHED else Exit.TRAINING)
