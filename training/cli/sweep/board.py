"""Progress of a sweep: a table that is redrawn on a terminal, lines in a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from training.cli.sweep.prepare import Sweep
from training.core import console, log, metric_units, units
from training.core.jsonl import Record, number, read_object
from training.core.messages import msg
from training.core.rundir import RunDir
from training.launcher import stop_signals
from training.monitor import print_table, run_figures, term_text, terminal
from training.monitor.history import History
from training.monitor.run_status import FAILED, FINISHED, RUNNING, STARTING, STOPPED
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import WAITING, SweepRow
from training.monitor.term_text import Line

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRun

REDRAWN_S = 1.0


class Event(Enum):
    STARTED = auto()
    ENDED = auto()


class _Watch:
    """Progress of a running training, from its files; each read covers what is new."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.since = run, time.time()
        self._history = History(run.metrics)
        self._plan: Record | None = None

    def row(self, run: SweepRun) -> SweepRow:
        self._history.update()
        self._plan = self._plan or read_object(self.run.plan)
        last = self._history.last
        began = (number(last.get("time")) or 0.0) >= self.since
        if not began:
            return SweepRow(run["name"], run["values"], STARTING)
        progress = run_figures.progress(
            self.run,
            self._history,
            self._plan,
            RUNNING,
            since=self.since,
            elapsed_s=None,
            summary=None,
            planned=(None, None),
        )
        training = run_figures.training(self.run, self._history, self.since)
        best, loss = training["eval_best"], training["loss"]
        if loss is not None:
            loss *= metric_units.display(training)[0]  # as in the row of an ended run
        return SweepRow(
            run["name"],
            run["values"],
            RUNNING,
            step=progress["step"],
            total=progress["total_steps"],
            loss=loss if best is None else best,
            loss_name="loss" if best is None else training["eval_name"],
            speed=training["tokens_per_s"] or training["samples_per_s"],
            seconds=progress["eta_s"],
        )


class Board:
    """Shows the runs of `sweep`."""

    def __init__(self, sweep: Sweep, *, ascii_only: bool) -> None:
        self.sweep, self.ascii_only = sweep, print_table.in_ascii(ascii_only)
        self.runs: Sequence[SweepRun] = sweep.record["runs"]
        self.live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._screen = console.of(1)
        self._rows = sweep_runs.read(sweep.folder, sweep.record)
        self._watches: dict[int, _Watch] = {}
        self._took: list[float] = []  # s, of runs that have finished here
        self._began: dict[int, float] = {}
        self._started, self._drawn_at = time.monotonic(), 0.0
        self._drawn: list[str] = []  # the lines of the table on the terminal
        self._width = 0  # of the terminal at that time
        self._note = ""

    def event(
        self,
        kind: Event,
        index: int,
        states: Sequence[str],
        *,
        where: str = "",
        row: SweepRow | None = None,
        why: str = "",
    ) -> None:
        """A run has started on the GPUs `where`, or has ended as `row`, failed because of `why`."""
        run = self.runs[index]
        place = f"{index + 1}/{len(self.runs)}"
        if kind is Event.STARTED:
            self._began[index] = time.monotonic()
            self._watches[index] = _Watch(RunDir(self.sweep.folder.experiments / run["name"]))
            on = msg("cli.sweep.on_gpus", gpus=where) if where else ""
            self._say("INFO", msg("cli.sweep.started", place=place, name=run["name"], where=on))
            return
        assert row
        self._watches.pop(index, None)
        row.values, row.state = run["values"], states[index]
        self._rows[index] = row
        now = time.monotonic()
        took = now - self._began.get(index, now)  # it may not have started
        if states[index] == FINISHED:
            self._took.append(took)
        level = {FINISHED: "SUCCESS", FAILED: "ERROR"}.get(states[index], "WARNING")
        text = msg(
            "cli.sweep.ended",
            place=place,
            name=run["name"],
            state=sweep_runs.word(states[index]),
            time=units.duration(took),
            score=row.score,
        )
        if why:
            console = self.sweep.folder.console(run["name"])
            text = msg("cli.sweep.failed", text=text, why=why, console=console)
        self._say(level, text)

    def stopping(self, number: int, *, again: bool) -> None:
        name = stop_signals.name(number)
        then = msg("cli.sweep.again") if stop_signals.insists(number) else ""
        text = (
            msg("cli.sweep.killing", name=name)
            if again
            else msg("cli.sweep.stopping", name=name, again=then)
        )
        self._note = text
        self._say("WARNING", text)

    def _say(self, level: str, text: str) -> None:
        """In a pipe every event; on a terminal only what the table cannot show."""
        if self.live and level in ("INFO", "SUCCESS"):
            return
        self.clear()
        log.say(level, text)

    def refresh(self, states: Sequence[str]) -> None:
        if not self.live or time.monotonic() - self._drawn_at < REDRAWN_S:
            return
        self._drawn_at = time.monotonic()
        rows = list(self._rows)
        for index, watch in self._watches.items():
            rows[index] = watch.row(self.runs[index])
        if self._screen.frozen:
            self._write("")  # shows what it has missed, if it can
            self._drawn = []
            return
        width, height = terminal.size()
        lines = self._lines(rows, states, width, height)
        colour = log.colourful(sys.stdout)
        text = [
            term_text.render(line, width - 1, colour=colour, ascii_only=self.ascii_only)
            for line in lines
        ]
        body = "".join(f"{line}\x1b[K\n" for line in text)
        begin, end = terminal.BEGIN, terminal.END_OF_SCREEN
        # else tmux keeps the rows wrapped as those that they replace
        erased = "" if width == self._width else "\x1b[J"
        self._write(f"{begin}{self._up(width)}\r{erased}{body}\x1b[J{end}")
        self._width = width
        self._drawn = [term_text.clean(line) for line in text]

    def clear(self) -> None:
        """Remove the table from the terminal, before a line of the log or the final table."""
        if self._drawn:
            self._write(f"{self._up(terminal.size()[0])}\r\x1b[J")
            self._drawn = []

    def _up(self, width: int) -> str:
        """Moves the cursor to the first row of the table, whose lines a resized terminal may have
        wrapped."""
        rows = len(self._drawn)
        if terminal.rewraps():
            rows = sum(term_text.rows_of(line, width) for line in self._drawn)
        return f"\x1b[{rows}A" if rows else ""

    def _write(self, text: str) -> None:
        """To a terminal, which may have been closed or show nothing."""
        try:
            self._screen.write(text.encode(sys.stdout.encoding, "replace"))
        except OSError:
            self.live = False

    def _lines(
        self, rows: list[SweepRow], states: Sequence[str], width: int, height: int
    ) -> list[Line]:
        counts = {state: states.count(state) for state in (FINISHED, RUNNING, WAITING, FAILED)}
        words = [
            f"{count} {sweep_runs.word(state)}"
            for state, count in counts.items()
            if count or state == FINISHED
        ]
        elapsed = units.duration(time.monotonic() - self._started)
        left = self._left(rows, counts[WAITING])
        right = msg("cli.sweep.left", elapsed=elapsed, left=units.duration(left))
        head: Line = [(f"{self.sweep.folder.name}  ", "bold"), (" · ".join(words), "")]
        room = max(1, height - 4)
        table = sweep_runs.lines(self._shown(rows, room), msg("monitor.column.left"), width - 1)
        hidden = len(rows) - (len(table) - 1)
        more: list[Line] = [[(msg("cli.sweep.more", count=hidden), "dim")]] if hidden else []
        return [term_text.sides(head, [(right, "dim")], width - 1), *table, *more]

    def _shown(self, rows: list[SweepRow], room: int) -> list[SweepRow]:
        """Where not all rows fit: running ones, then those that have ended, then waiting ones, in
        the order of the runs."""
        for row in rows:
            if row.state not in (STARTING, RUNNING):
                row.seconds = None  # of the time until its end; nothing is known of what is left
        order = {STARTING: 0, RUNNING: 0, FAILED: 1, STOPPED: 2, FINISHED: 3, WAITING: 4}
        if len(rows) <= room:
            return rows
        ranks = sorted(range(len(rows)), key=lambda i: (order.get(rows[i].state, 5), i))
        return [rows[i] for i in sorted(ranks[:room])]

    def _left(self, rows: Sequence[SweepRow], waiting: int) -> float | None:
        """Seconds until the last run ends, from the runs so far; None: unknown."""
        left = [row.seconds for row in rows if row.state == RUNNING and row.seconds is not None]
        whole = list(self._took)
        for index in self._watches:
            seconds = rows[index].seconds
            if seconds is not None:
                whole.append(time.monotonic() - self._began[index] + seconds)
        if not whole or len(left) < len(self._watches):
            return None
        mean = sum(whole) / len(whole)
        return max([(sum(left) + waiting * mean) / self.sweep.jobs, *left])
