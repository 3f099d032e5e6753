"""Hang detection for Duet's own training, by heartbeats: cheap in normal operation, thorough once a
phase takes too long."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from training.core import heartbeat, log, phase_timeouts, phases, rundir
from training.core.heartbeat import HeartbeatRecord
from training.core.messages import msg
from training.core.phase_timeouts import COMPILE_S, START_S, PhaseTimeouts
from training.watchdog import culprit, hang_dump, traced
from training.watchdog.hang_report import HANG, STOPPED, HangFinding
from training.watchdog.probes import procfs, snapshot
from training.watchdog.probes.procfs import Process
from training.watchdog.probes.trace import IDLE_BYTES, IDLE_FAULTS, IDLE_SHARE
from training.watchdog.starved import Starved, queued

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

STOPPED_S = 2.0  # a process stopped for longer is reported
ROLL_S = 10.0
WATCHED = 0.25  # part of the floor in which CPU starvation must have been measured
AGAIN = 0.5  # of the floor: pause after a look that found no hang
READING_TIMES = 5.0  # slow data, and a rank without a CPU core, get this many budgets
ABSENT_S = 10.0  # a rank without a heartbeat must be idle for this time before it counts as a hang
UNREAD_S = 60.0  # a heartbeat file that stays unreadable for longer is reported
# look() was not called: the job or the machine was frozen, and earlier times do not count
ASLEEP_S = 10.0
_SECONDS = re.compile(r"\b\d+ s\b")
MISSING_S = 25.0  # the other ranks are waiting in the rendezvous: missing ranks are reported


def elsewhere_s(floor_s: float) -> float:
    """For how long all ranks of this machine may wait for a rank of another, which may be saving a
    large checkpoint: hang detection there names it."""
    return phase_timeouts.backstop_s(floor_s, supervised=True)


class HeartbeatWatchdog:
    """For one attempt; `look()` is called a few times a second. Unless it `acts`, it logs and
    writes nothing."""

    def __init__(self, run: rundir.RunDir, plan: Plan, ranks: range, *, acts: bool = True) -> None:
        self.run, self.ranks, self._acts = run, ranks, acts
        self.others_elsewhere = len(ranks) < plan["ranks"]
        self.floor_s = float(plan["config"]["hang_timeout"])
        self._budgets = PhaseTimeouts(self.floor_s, compiled=bool(plan["compile"]["value"]))
        self._readings, self._starved = heartbeat.Readings(run.heartbeats, ranks), Starved()
        # ranks without a heartbeat: since when, its process and its waiting time then
        self._quiet: dict[int, tuple[float, Process, float]] = {}
        self._unread_since: float | None = None
        self._stopped: dict[int, float] = {}  # rank → since when
        self._reported: set[str] = set()
        self._next_look = self._next_roll = 0.0
        self._begun = self._looked = time.monotonic()
        self._awake = 0.0

    def look(self, pids: Mapping[int, int]) -> HangFinding | None:
        """`pids`: of the running ranks, as started; empty under torchrun: those in the heartbeats.
        A finding is certain: its run can be ended."""
        if not self.floor_s:
            return None
        now = time.monotonic()
        if now - self._looked > ASLEEP_S:
            self._awake = now
            self._stopped.clear()
        self._looked = now
        everything = self._readings.read()
        pids = pids or {b.rank: b.pid for b in everything}
        if absent := set(pids) - {b.rank for b in everything}:
            return self._absent(min(absent), pids, now)
        beats = [b for b in everything if b.rank in pids and b.phase != heartbeat.FINISHED]
        if now > self._next_roll:
            self._next_roll = now + ROLL_S
            self._budgets.roll([self.run.heartbeat(b.rank) for b in beats])
        stopped = self._look_for_stopped(pids, now)
        overdue: list[HeartbeatRecord] = []
        if self._all_read(pids, now):
            self._report_missing(beats)
            overdue = self._overdue(beats, pids)
        if (not overdue and stopped is None) or len(self._stopped) == len(pids):
            return None
        if stopped is None and now < self._next_look:
            return None
        return self._examine(beats, pids, overdue, stopped)

    def _absent(self, rank: int, pids: Mapping[int, int], now: float) -> HangFinding | None:
        """No heartbeat so far in this attempt. A rank that computes, reads or waits for a core is
        still starting."""
        since, pid = max(self._begun, self._awake), pids[rank]
        process = procfs.read_process(pid)
        if now - since <= START_S or process is None or process.state in "ZXt":  # t: in a debugger
            return None
        known, waited = self._quiet.get(rank), sum(queued(pid).values())
        if known is None or known[1].pid != pid or known[0] < since:
            self._quiet[rank] = now, process, waited
            return None
        seconds, before = now - known[0], known[1]
        if seconds < ABSENT_S:
            return None
        cpu = process.cpu_s - before.cpu_s + waited - known[2]
        read = (process.io_bytes or 0) - (before.io_bytes or 0)
        busy = (
            cpu > IDLE_SHARE * seconds
            or read > IDLE_BYTES * seconds
            or process.faults - before.faults > IDLE_FAULTS * seconds
        )
        if busy and now - since < READING_TIMES * START_S:
            self._quiet[rank] = now, process, waited
            self._warn(
                "warning.no_heartbeat",
                msg("watchdog.heartbeat.none_but_busy", rank=rank, silent_s=now - since),
            )
            return None
        how = msg("watchdog.heartbeat.never")
        return hang_dump.keep(self.run, HangFinding(HANG, rank, None, how, {}, {}, now - since), {})

    def _all_read(self, pids: Mapping[int, int], now: float) -> bool:
        """Are all heartbeats readable? Unreadable ones prove nothing: no limit counts meanwhile."""
        unread = sorted(self._readings.unread & pids.keys())
        if not unread:
            self._unread_since = None
            return True
        since = self._unread_since = self._unread_since or now
        if now - since > UNREAD_S:
            files = ", ".join(str(self.run.heartbeat(rank)) for rank in unread)
            self._warn(
                "warning.heartbeat_unreadable",
                msg("watchdog.heartbeat.unreadable", files=files),
            )
        return False

    def patience_s(self, beat: HeartbeatRecord) -> float:
        """Twice the usual duration of its phase: for a rank that has been asked to stop."""
        return 2 * self._budgets.usual_s(beat, self.run.heartbeat(beat.rank))

    def budget_s(self, beat: HeartbeatRecord) -> float:
        return self._budgets.seconds(beat, self.run.heartbeat(beat.rank))

    def _overdue(
        self, beats: list[HeartbeatRecord], pids: Mapping[int, int]
    ) -> list[HeartbeatRecord]:
        """The ranks that no other rank is behind, if all of them are over their budget: only the
        slowest rank's timeout counts."""
        if not beats:
            return []
        lowest = min(map(phases.place, beats))
        last = [b for b in beats if phases.place(b) == lowest]
        ages = {b.rank: min(b.age_s, time.monotonic() - self._awake) for b in last}
        for b in last:
            if ages[b.rank] > self.floor_s / 2:
                self._starved.note(b, pids[b.rank])
        # Until this process has looked for long enough, CPU starvation of the ranks is unknown.
        watched_s = WATCHED * self.floor_s if self._acts else 0.0
        late = [
            b
            for b in last
            if ages[b.rank] > self.floor_s
            and self._starved.watched_s(b) >= watched_s
            and ages[b.rank] > self.budget_s(b)
        ]
        return last if len(late) == len(last) else []

    def _look_for_stopped(self, pids: Mapping[int, int], now: float) -> int | None:
        """A rank that is stopped by a signal does not resume by itself; it is reported before its
        phase is overdue. Ranks that are all stopped were stopped on purpose. While a debugger
        holds one, no time counts."""
        debugged = False
        for rank, pid in pids.items():
            process = procfs.read_process(pid)
            if process is None or process.state not in ("T", "t"):
                self._stopped.pop(rank, None)
                continue
            since = now - self._stopped.setdefault(rank, now)
            if since > STOPPED_S and process.state == "t":
                debugged = True
                self._warn("warning.debugger", traced.text(rank, pid))
        self._stopped = {rank: since for rank, since in self._stopped.items() if rank in pids}
        if debugged:
            self._awake = now
            return None
        some_run, limit_s = len(self._stopped) < len(pids), max(STOPPED_S, self.floor_s)
        for rank, began in self._stopped.items():
            if now - began > STOPPED_S and (some_run or self.others_elsewhere):
                self._report_stopped(rank, pids[rank], limit_s if some_run else None)
        long = [rank for rank, began in self._stopped.items() if now - began > limit_s]
        return long[0] if long and some_run else None

    def _report_stopped(self, rank: int, pid: int, limit_s: float | None) -> None:
        """`limit_s`: after it the run is ended."""
        beat = heartbeat.read(self.run.heartbeat(rank))
        # as in HangFinding.sentence(), in every language: ./duet diagnose reads it in logs
        place = f" in {str(beat)!r}" if beat else ""
        text = msg("watchdog.heartbeat.stopped", rank=rank, place=place, pid=pid)
        if self._acts and text not in self._reported:
            self._reported.add(text)
            log.error(
                text
                if limit_s is None
                else msg("watchdog.heartbeat.ended_after", text=text, limit_s=limit_s)
            )
            self.run.event(
                "verdict",
                kind=STOPPED,
                rank=rank,
                where=None,
                phase=str(beat),
                text=text,
                since_s=STOPPED_S,
                final=False,
            )

    def _report_missing(self, beats: list[HeartbeatRecord]) -> None:
        """Report ranks that have not reached the rendezvous in which others wait."""
        there = [
            b for b in beats if b.phase == "rendezvous with the other ranks" and b.age_s > MISSING_S
        ]
        missing = {
            b.rank: b
            for b in beats
            if b.first_step == 0
            and phases.place(b) < min((phases.place(t) for t in there), default=(-9, 0, 0))
        }
        if there and missing:
            shown = "; ".join(
                msg("watchdog.heartbeat.has_been_in", rank=rank, beat=b, age_s=b.age_s)
                for rank, b in missing.items()
            )
            self._warn(
                "warning.rank_missing",
                msg(
                    "watchdog.heartbeat.missing",
                    there=", ".join(str(b.rank) for b in there),
                    missing=", ".join(map(str, missing)),
                    shown=shown,
                ),
            )

    def _warn(self, code: str, text: str) -> None:
        key = _SECONDS.sub("", text)
        if self._acts and key not in self._reported:
            self._reported.add(key)
            log.warning(text)
            self.run.event("warning", code=code, text=text)

    def _examine(
        self,
        beats: list[HeartbeatRecord],
        pids: Mapping[int, int],
        overdue: list[HeartbeatRecord],
        stopped: int | None,
    ) -> HangFinding | None:
        self._next_look = time.monotonic() + AGAIN * self.floor_s  # if this one finds nothing
        if stopped is None and any(self._gets_no_core(b, pids[b.rank]) for b in overdue):
            return None
        seen = snapshot.gather(self.run, beats, pids)
        after = {b.rank: b for b in heartbeat.read_all(self.run.heartbeats, self.ranks)}
        moved = not overdue or any(
            b.rank not in after or after[b.rank].beats != b.beats for b in overdue
        )
        if not seen or any(e.process.gone for e in seen) or (moved and stopped is None):
            return None  # it continues, or its exit is noticed elsewhere
        if stopped is None and self._only_slow(culprit.behind(seen)):
            return None
        found = culprit.find_culprit(seen)
        if moved and found.kind != STOPPED:
            return None  # it was stopped, and has been continued since
        if (
            self.others_elsewhere
            and found.rank is None
            and found.kind == HANG
            and found.since_s < elsewhere_s(self.floor_s)
        ):
            return None  # they wait for another machine, where hang detection names the rank
        if self._acts and snapshot.complete(self.run, seen):
            if stopped is None and self._only_slow(culprit.behind(seen)):
                return None
            found = culprit.find_culprit(seen)
        beat = next((e.beat for e in seen if e.rank == found.rank), None)
        found = replace(found, phase=str(beat) if beat else None)
        return hang_dump.keep(self.run, found, snapshot.texts(seen)) if self._acts else found

    def _gets_no_core(self, beat: HeartbeatRecord, pid: int) -> bool:
        """Does it lack a CPU core? Time spent waiting for one does not count, up to a limit."""
        starved, budget = self._starved.seconds(beat, pid), self.budget_s(beat)
        if not starved or beat.age_s - starved > budget or beat.age_s > READING_TIMES * budget:
            return False
        self._warn(
            "warning.machine_overloaded",
            msg("watchdog.heartbeat.no_core", rank=beat.rank, beat=beat, age_s=beat.age_s),
        )
        return True

    def _only_slow(self, last: list[snapshot.RankSnapshot]) -> bool:
        """Does a rank still read from a slow disk, or compile? It gets more time."""
        for e in last:
            rank, beat, age_s = e.rank, e.beat, e.beat.age_s
            if culprit.still_reading(e):
                limit_s, code = READING_TIMES * self.budget_s(beat), "warning.still_reading"
                text = msg("watchdog.heartbeat.still_reads", rank=rank, beat=beat, age_s=age_s)
            elif culprit.still_compiling(e):
                limit_s, code = COMPILE_S, "warning.still_compiling"
                text = msg("watchdog.heartbeat.still_compiles", rank=rank, beat=beat, age_s=age_s)
            else:
                continue
            self._warn(code, text)
            return age_s < limit_s
        return False


def look_once(
    run: rundir.RunDir, plan: Plan, pids: Mapping[int, int], floor_s: float
) -> HangFinding | None:
    """One look without side effects: a rank that is overdue by `floor_s`, and the reason."""
    watch = HeartbeatWatchdog(
        run,
        {**plan, "config": {**plan["config"], "hang_timeout": floor_s}},
        range(min(pids), max(pids) + 1),
        acts=False,
    )
    return watch.look(pids)
