"""Hang detection of one attempt: by heartbeats for Duet's own training, by stacks and output for
user scripts."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import heartbeat, log, rundir
from training.core.messages import msg
from training.core.tail import log_sizes
from training.core.units import plural
from training.plan.script_words import WATCH
from training.watchdog import (
    called,
    discovery,
    hang_dump,
    printed_end,
    printed_steps,
    stall_detector,
)
from training.watchdog.hang_report import UNEVEN, HangFinding
from training.watchdog.heartbeat_watchdog import HeartbeatWatchdog
from training.watchdog.own_ranks import OwnRanks
from training.watchdog.probes import flight_recorder, on_request, procfs
from training.watchdog.rank_exit import RankExit
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.slow_rank import SlowRankWatch
from training.watchdog.waiting_lines import WaitingLines
from training.watchdog.wrapped import TrainingProcesses

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

OFF_S, ERRORS = 60.0, 5  # after an internal error, doubled each time; this many turn it off
FORGET_S = 3600.0  # without a further internal error: it counts no more
NONE_S = 60.0  # a watched command has started no rank for that long: reported
SILENT_S = 2.0  # what is printed after a silence of this length is read
MAYBE_S = 5.0  # interval of the search for further ranks while a process may be one
BELOW_S = 1.0  # interval of the search for the ranks of torchrun


class RanksWatch:
    """For the ranks of one machine; `look()` is called a few times a second."""

    def __init__(self, run: rundir.RunDir, plan: Plan, ranks: range, world_size: int) -> None:
        self.run, self.ranks = run, ranks
        self._heartbeats = self._script = self._slow = None
        self._errors, self._off_until = 0, 0.0
        self._lines, self._heard = WaitingLines(run.ranks), time.monotonic()
        self._unread: float | None = None  # time of the first output that was not read yet
        self._below: dict[int, int] = {}  # rank → pid, under torchrun
        self._been_below: set[int] = set()  # ranks of the same start, seen so far under torchrun
        self._next_below = 0.0
        self._trainings = TrainingProcesses()
        self.trained: dict[int, int] = {}  # PID → rank, of a script's ranks and trainings so far
        self._own: OwnRanks | None = None  # of the only rank
        self._alone = world_size == 1  # is there no other? updated for a watched command
        script = plan.get("script")
        self._watched = (
            Path(script["path"]).name if script and plan["launcher"]["value"] == WATCH else ""
        )
        self._common_log: Path | None = None  # of all ranks, where another launcher starts them
        self._since = time.monotonic()
        self._found_or_warned = False  # of a watched command: ranks, or that there are none
        self._expected: set[int] | None = None  # ranks of a watched command, once known
        self._earlier = log_sizes(run.ranks) if script else {}  # of earlier attempts
        if script:
            if self._watched or plan["launcher"]["value"] == "torchrun":
                self._common_log = run.launcher_log(self._watched or "torchrun")
            if self._alone or self._watched:
                self._own = OwnRanks(Path(script["path"]).name)
            floor_s, elsewhere = float(plan["config"]["hang_timeout"]), len(ranks) < world_size
            self._script = ScriptWatch(
                floor_s,
                elsewhere=elsewhere,
                pending=lambda rank: flight_recorder.pending(run.ranks, rank),
                begun=lambda rank: flight_recorder.begun(run.ranks, rank),
                newest_call=lambda rank: flight_recorder.newest(run.ranks, rank),
                trains=self._trains,
            )
            self._slow = SlowRankWatch(
                floor_s,
                read=functools.partial(flight_recorder.arrivals, run.ranks),
                warn=self._warn_of_slow,
            )
        else:
            self._heartbeats = HeartbeatWatchdog(run, plan, ranks)

    def output(self) -> None:
        """A rank has printed something. After a silence the next look reads what."""
        self._heard = time.monotonic()
        if self._script and self._lines.remembers:
            self._unread = self._unread or self._heard
        elif self._script:
            self._script.output(self._heard, training=self._ranks_seen)

    def close(self) -> None:
        """Wait for its threads: processes must be started from a process with one thread."""
        try:
            for watch in (self._script, self._slow):
                if watch:
                    watch.close()
        except Exception as error:
            self._failed(error)

    def elsewhere_ended(self) -> None:
        """The ranks of all other machines have ended: no rank here waits for them."""
        for watch in (self._heartbeats, self._script):
            if watch:
                watch.others_elsewhere = False

    def patience_s(self, beat: heartbeat.HeartbeatRecord) -> float:
        """Limit of the phase of a rank that has been asked to stop, in seconds."""
        return self._from_heartbeats(HeartbeatWatchdog.patience_s, beat)

    def budget_s(self, beat: heartbeat.HeartbeatRecord) -> float:
        """Limit of the phase, in seconds; 0 where unknown."""
        return self._from_heartbeats(HeartbeatWatchdog.budget_s, beat)

    def _from_heartbeats(
        self,
        what: Callable[[HeartbeatWatchdog, heartbeat.HeartbeatRecord], float],
        beat: heartbeat.HeartbeatRecord,
    ) -> float:
        try:
            return what(self._heartbeats, beat) if self._heartbeats else 0.0
        except Exception as error:
            self._failed(error)
            return 0.0

    def look(
        self, started: Mapping[int | None, int], ended: Mapping[int, int]
    ) -> HangFinding | None:
        """`started`: rank → PID of the running children; None is torchrun, whose children are the
        ranks. `ended`: rank → status. An internal error turns hang detection off for a while, with
        its traceback in the run directory, and never ends the training."""
        if time.monotonic() < self._off_until:
            return None
        try:
            found = self._look(started, ended)
        except Exception as error:
            self._failed(error)
            return None
        if time.monotonic() > self._off_until + FORGET_S:
            self._errors = 0
        return found

    def _failed(self, error: Exception) -> None:
        if time.monotonic() < self._off_until:
            return  # already reported
        self._errors += 1
        off_s = OFF_S * 2 ** (self._errors - 1) if self._errors < ERRORS else math.inf
        self._off_until = time.monotonic() + off_s
        what, file = f"{type(error).__name__}: {error}", self.run.watch_error
        log.warning(
            msg("watchdog.off_for", off_s=off_s, what=what, file=file)
            if off_s < math.inf
            else msg("watchdog.off_for_attempt", what=what, file=file)
        )
        with contextlib.suppress(OSError):
            self.run.watch_error.write_text(
                "".join(traceback.format_exception(error)), encoding="utf-8"
            )

    def _look(
        self, started: Mapping[int | None, int], ended: Mapping[int, int | None]
    ) -> HangFinding | None:
        pids = {rank: pid for rank, pid in started.items() if rank is not None}
        if self._heartbeats:
            return self._heartbeats.look(pids)
        assert self._script
        self._read_output(self._script)
        if self._watched:
            pids = self._adopt(started[None])
            # only the launcher of the rank knows its status
            ended = {**dict.fromkeys(self._been_below - pids.keys(), None), **ended}
        elif not pids:
            pids = self._torchruns(started[None])
            # torchrun ends all ranks when one fails
            ended = {**dict.fromkeys(self._been_below - pids.keys(), 0), **ended}
        if self._own and self._alone and len(pids) == 1:
            (launcher,) = pids.values()
            pids = self._own.of(launcher) or pids
            ended = {**dict.fromkeys(self._own.ended, None), **ended}
            self._script.others_elsewhere = self._own.elsewhere
            self._script.joining = self._own.joining
        trainings = self._trainings.of(pids)
        self.trained |= {pid: rank for known in (pids, trainings) for rank, pid in known.items()}
        pids = trainings
        if self._slow:
            self._slow.look(pids)
        found = self._script.look(pids, ended)
        if found is None:
            return None
        if (death := self._death(found, ended)) is not None:
            return replace(found, death=death)
        elsewhere = self._script.others_elsewhere
        found = called.refine(found, self.run.ranks, pids, elsewhere=elsewhere, trains=self._trains)
        if found.kind == UNEVEN:
            found = replace(found, how=found.how + printed_steps.shown(self.run, self._earlier))
        if found.compares or found.kind == UNEVEN:
            lines = printed_end.survived(self.run, self.ranks, self._earlier)
            found = replace(found, survived=tuple(lines))
        found = _complete(found, self.run, pids)
        return hang_dump.keep(self.run, found, found.texts())

    @property
    def _ranks_seen(self) -> bool:
        """Not yet: a watched command prints itself, such as torchrun about OMP_NUM_THREADS."""
        return bool(self._been_below) or not self._watched

    def _read_output(self, script: ScriptWatch) -> None:
        """Report output to the hang detection, except that torch waits."""
        if self._unread is not None:
            if not self._lines.only():
                script.output(self._unread, training=self._ranks_seen)
            self._unread = None
        elif time.monotonic() - self._heard > SILENT_S:
            self._lines.remember()

    def _death(self, found: HangFinding, ended: Mapping[int, int | None]) -> RankExit | None:
        """The failure of the guilty rank, by what it has printed, unless its status shows one."""
        if found.rank is None or ended.get(found.rank) or not printed_end.is_over(found, ended):
            return None
        log = self._common_log or self.run.rank_log(found.rank)
        since, alone = self._earlier.get(log, 0), self._common_log is None
        return printed_end.of_rank(log, found.rank, since, alone=alone)

    @property
    def adopted(self) -> dict[int, int]:
        """Rank → PID of the running ranks that a watched command, or the only rank, has started."""
        own = self._own.running if self._own and self._alone else {}
        return own or (self._below if self._watched else {})

    def _adopt(self, command: int) -> dict[int, int]:
        """Ranks of a watched command, whose number is known when it has started the first one. The
        last one's end is the end of their training: the command may start others, as torchrun does
        with other numbers when a machine is lost or joins."""
        self._below = {rank: pid for rank, pid in self._below.items() if procfs.lives(pid)}
        if not self._below:
            self._been_below, self._expected = set(), None
        now = time.monotonic()
        if self._below.keys() != self._expected and now >= self._next_below:
            self._next_below = now + BELOW_S
            settled = now - self._since > NONE_S
            started = discovery.started_by(command, settled)
            found = started.ranks
            if self._take(started):
                self._next_below = now + MAYBE_S
            if settled and not found and not self._found_or_warned:
                log.warning(msg("watchdog.no_ranks", command=self._watched, seconds=NONE_S))
            self._found_or_warned |= settled or bool(found)
        return self._below

    def _take(self, started: discovery.Started) -> bool:
        """Take over the ranks of a watched command. Returns whether others may join them."""
        found, local, world, maybe = started
        # Others have ended by which these were recognised and numbered: Lightning's first rank.
        if found != self._below and {*found.values()} <= {*self._below.values()}:
            return False
        if found and found != self._below and len(found) == local:
            ranks, pids = plural(len(found), "rank"), ", ".join(map(str, found.values()))
            log.info(msg("watchdog.adopted", ranks=ranks, command=self._watched, pids=pids))
        if self._script and found:
            self._script.others_elsewhere, self._script.joining = world > local, maybe > 0
        numbers = {pid: rank for rank, pid in found.items()}
        if any(numbers.get(pid, rank) != rank for rank, pid in self._below.items()):
            self._been_below = set()  # with further ranks, they have other numbers
        self._below, self._alone = found, world == 1
        self._expected = {*found} if found and len(found) == local and not maybe else None
        self._been_below |= found.keys()
        return maybe > 0

    def _torchruns(self, launcher: int) -> dict[int, int]:
        """Ranks of torchrun: some start late, and their exit statuses are unknown."""
        known = {rank: pid for rank, pid in self._below.items() if procfs.lives(pid)}
        if len(known) < len(self.ranks) and time.monotonic() >= self._next_below:
            self._next_below = time.monotonic() + BELOW_S
            known = discovery.below(launcher) or known
        self._below = known
        self._been_below |= known.keys()
        return known

    def _warn_of_slow(self, text: str, rank: int) -> None:
        log.warning(text)
        self.run.event("warning", code="warning.slow_rank", text=text, rank=rank, by="supervisor")

    def _trains(self) -> bool:
        """Has the script printed a step, a loss or other training output in this attempt?"""
        from training.diagnose.log_parsers.log_metrics import ScriptFigures

        return ScriptFigures(self.run.ranks, self._earlier).read() is not None


def _complete(found: HangFinding, run: rundir.RunDir, pids: Mapping[int, int]) -> HangFinding:
    """With the stacks of the ranks that could not be read from outside: they are ended now."""
    blind = {r: pid for r, pid in pids.items() if isinstance(found.stacks.get(r), str)}
    written = on_request.ask(run.ranks, blind)
    waiting = {
        rank: stall_detector.place(written[rank]) if rank in written else place
        for rank, place in found.waiting.items()
    }
    return replace(found, stacks={**found.stacks, **written}, waiting=waiting)
