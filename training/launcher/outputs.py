"""Output of the ranks of this machine during one attempt: to their logs, that of the first rank
also to the console."""

from __future__ import annotations

import functools
import math
import os
import selectors
import time
from collections.abc import Callable, Collection
from pathlib import Path

from training.core import log, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.core.plain_text import one_line, plain, shortened
from training.core.units import plural
from training.launcher import other_ranks
from training.launcher.backlog import Backlog
from training.launcher.child import Child
from training.launcher.other_ranks import OtherRanks
from training.launcher.outcome import Outcome
from training.launcher.output import RankOutput
from training.launcher.symptoms import Symptoms

GATHER_S = 0.002


class Outputs:
    """`heard` is called when a rank has printed something. `shown`: the ranks whose output the
    console shows, each line with its rank if they are not the `first` one of this machine alone.
    `others`: collects lines of ranks that are not shown."""

    def __init__(
        self,
        run: rundir.RunDir,
        selector: selectors.BaseSelector,
        heard: Callable[[], None],
        shown: Collection[int],
        first: int,
        others: OtherRanks | None,
    ) -> None:
        self._run, self._selector, self._heard = run, selector, heard
        self._shown, self._first, self._others = shown, first, others
        self.in_threads: dict[int, str] = {}  # rank → exception that has ended a thread of it
        # rank → exception that it could not write to its file
        self.unwritten: dict[int, str] = {}
        self._open: dict[int, RankOutput] = {}  # by descriptor
        self._symptoms: dict[Path, Symptoms] = {}  # of shown ranks, by their log
        self._told_of_more = False
        self._trickles = False  # output comes in small pieces
        self._backlog = Backlog()

    @property
    def labelled(self) -> bool:
        """Does the console show the rank of each line?"""
        return set(self._shown) != {self._first}

    def add(self, child: Child) -> tuple[Path, int]:
        """Its log, and the size of the log before this attempt."""
        path = (
            self._run.launcher_log(child.launcher)
            if child.rank is None
            else self._run.rank_log(child.rank)
        )
        rank = self._first if child.rank is None else child.rank
        shown = child.rank is None or rank in self._shown
        labelled = child.rank is not None and self.labelled
        # a launcher prints the lines of all ranks, and may be the user's own
        if shown and child.rank is not None:
            self._symptoms[path] = Symptoms()
        errors = max(child.outputs, default=2)  # 1 where both streams are joined
        for number, fd in child.outputs.items():
            output = self._open[fd] = RankOutput(
                fd,
                path,
                number if shown else None,
                b"[rank%d] " % rank if labelled else b"",
                backlog=self._backlog,
                symptoms=self._symptoms.get(path) if number == errors else None,
            )
            if self._others and number == 2 and child.rank is not None:
                add = functools.partial(self._others.add, rank, first=shown)
                output.heard = add
            self._selector.register(fd, selectors.EVENT_READ, self._on_output)
        return path, output.begins

    def patience_s(self, most_s: float) -> float:
        """How long to wait for output."""
        return self._backlog.patience_s(most_s)

    def between(self) -> None:
        """Called between two looks at the descriptors. Shows what is left to show, and waits
        briefly where output comes in small pieces: one system call a line would take CPU time from
        the ranks."""
        self._backlog.catch_up()
        if self._trickles and self._backlog.empty:
            time.sleep(GATHER_S)
        self._trickles = False

    def _on_output(self, fd: int) -> None:
        self._heard()
        more = self._open[fd].drain()
        self._trickles |= self._open[fd].trickles
        if not more:
            self._selector.unregister(fd)
            self._backlog.then(functools.partial(self._close, fd))

    def _close(self, fd: int) -> None:
        self.show_threads(ended=True)
        self._keep_unwritten()
        self._open.pop(fd).close()

    def _keep_unwritten(self) -> None:
        for output in self._open.values():
            if (text := output.unwritten()) and (number := output.path.stem[4:]).isdecimal():
                self.unwritten[int(number)] = text

    def show_threads(self, ended: bool = False) -> None:
        """Report exceptions in threads, which end neither the rank nor the run: as an event, and as
        a warning where only the log of that rank shows them."""
        for output in self._open.values():
            if not (found := output.thread(ended)) or not output.path.stem[4:].isdecimal():
                continue
            rank, exception = int(output.path.stem[4:]), shortened(one_line(found), 300)
            self.in_threads.setdefault(rank, exception)
            text = msg(
                "launcher.thread_exception",
                rank=output.path.stem,
                exception=exception,
                path=output.path,
            )
            if not output.on_console:
                log.warning(text)
            self._run.event(
                "warning",
                code="warning.thread_exception",
                text=text,
                rank=rank,
                by="supervisor",
            )

    def show_unfinished(self) -> None:
        """Prompts and progress bars of ranks whose lines are labelled."""
        for output in self._open.values():
            output.show_unfinished()

    def show_last_of_others(self, outcome: Outcome) -> None:
        """At the end: also the latest, without those that a failure has caused."""
        if self._others and outcome.failed_at is not None:
            failed = outcome.guilty[0] if outcome.guilty else None
            self._others.drop_after(outcome.failed_at, failed)
        self.show_others(ended=True)
        if outcome.failed_at is None and not outcome.killed:
            self._warn_of_symptoms()
            if outcome.asked == Exit.DONE and not outcome.resized:  # else by that request
                self._warn_of_exceptions()

    def _warn_of_symptoms(self) -> None:
        """Without a failure nothing else on the console mentions them."""
        for path, symptoms in self._symptoms.items():
            if count := symptoms.lines.dropped:
                log.warning(msg("launcher.symptoms", count=count, path=path))

    def _warn_of_exceptions(self) -> None:
        """Of ranks that are not on the console, and have caught them."""
        for rank, count, last in self._others.exceptions() if self._others else ():
            text = msg(
                "launcher.others.exceptions",
                rank=rank,
                exceptions=plural(count, "exception"),
                last=shortened(one_line(last.decode("utf-8", "replace")), 300),
                path=self._run.rank_log(rank),
            )
            log.warning(text)
            self._run.event(
                "warning", code="warning.exception_caught", text=text, rank=rank, by="supervisor"
            )

    def show_others(self, ended: bool = False) -> None:
        """Lines that only other ranks print on standard error."""
        if self._others is None:
            return
        for rank, line in self._others.due(math.inf if ended else None):
            log.raw(f"[rank{rank}] {plain(line.decode('utf-8', 'replace'))}\n")
        if self._others.silenced and not self._told_of_more:
            self._told_of_more = True
            log.info(msg("launcher.others.more", most=other_ranks.MOST, folder=self._run.ranks))

    def drain_rest(self) -> None:
        """The remaining output of ended children; a grandchild that keeps the pipe open cannot
        block this."""
        for fd in list(self._open):
            # one that has ended is closed as soon as its output is on the console
            if output := self._open.get(fd):
                os.set_blocking(fd, False)
                while output.drain():
                    pass
        self._backlog.show_all()
        self.show_threads(ended=True)
        self._keep_unwritten()
        for output in self._open.values():
            output.close()
        self._open.clear()
