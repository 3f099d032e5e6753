"""States of the ranks of one run: heartbeats, processes, and the figures rank 0 recorded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from training.core import heartbeat, phase_timeouts, rundir, standing
from training.core.jsonl import Record, dig, items, mtime, whole
from training.host.placement import RANK
from training.monitor import host_stats
from training.watchdog import rank_process

if TYPE_CHECKING:
    from training.core.contracts.state import RankState
    from training.monitor.history import History

LATE_S = 30.0  # a rank whose heartbeat is older is marked late, unless its phase may last longer
LOOK_S = 60.0  # between looks for the process of a rank, which reads all its mappings
MOST_RANKS = 4096  # that a plan may list


class Listed(NamedTuple):
    """A rank's process. `seen`: when it was known to be alive, unix s."""

    process: Record
    seen: float | None
    elsewhere: bool  # on another machine

    @property
    def pid(self) -> int | None:
        return whole(self.process.get("pid"))


UNLISTED = Listed({}, None, False)


class RankStates:
    """Reads the heartbeats of one run, and keeps the last of each rank."""

    def __init__(self, run: rundir.RunDir) -> None:
        self.run = run
        self._beats: dict[int, heartbeat.HeartbeatRecord] = {}
        self._here: dict[int, int] = {}  # PIDs on this machine, if the ranks are on several
        # (PID, monotonic s) of the last look for one that has not been seen here: with thousands of
        # ranks, most are elsewhere
        self._looked: dict[int, tuple[int, float]] = {}

    def read(self, plan: Record | None, supervisor: Record, since: float) -> list[RankState]:
        """One entry for each rank, with or without a heartbeat. Those of an earlier start are
        ignored: from before `since` (unix s), and of a process that this start does not list."""
        # A rank whose heartbeat cannot be read now keeps its last one.
        self._beats |= {b.rank: b for b in heartbeat.read_all(self.run.heartbeats)}
        listed = self._listed(plan or {}, supervisor)
        beats = {
            rank: beat
            for rank, beat in self._beats.items()
            # its own time may be earlier if the clock was set back
            if beat.wall_time >= since or beat.pid == listed.get(rank, UNLISTED).pid
        }
        # of a watched command as many as have been found, which have ended before it
        expected = max(whole(dig(plan, "ranks")) or 0, whole(supervisor.get("found")) or 0)
        numbers = {*range(min(expected, MOST_RANKS)), *beats, *listed}
        elsewhere = standing.other_host(plan, supervisor) is not None
        has_processes = not (self.run.is_archived or standing.is_copy(self.run, plan))
        out: list[RankState] = []
        for rank in sorted(numbers):
            beat = beats.get(rank)
            away = elsewhere or self._may_be_elsewhere(plan, beat)
            known = listed.get(rank) or Listed({}, None, away)
            if beat and known.pid is None:
                seen = known.seen or beat.wall_time
                known = Listed({"pid": beat.pid}, seen, known.elsewhere)
            pid = known.pid
            living = (
                has_processes
                and not known.elsewhere
                and host_stats.alive(known.process, known.seen or time.time())
            )
            age = None
            # The monotonic clock is that of one machine, and restarts at boot.
            if beat:
                age = (
                    beat.age_s
                    if living and beat.monotonic_ns <= time.monotonic_ns()
                    else max(0.0, time.time() - beat.wall_time)
                )
            out.append(
                {
                    "rank": rank,
                    "pid": pid,
                    "alive": living if pid and not known.elsewhere else None,
                    "epoch": beat.epoch if beat else None,
                    "step": beat.step if beat else None,
                    "phase": beat.phase if beat else None,
                    "doing": str(beat) if beat else None,
                    "beat_age_s": age,
                    "beat_unix_s": beat.wall_time if beat else None,
                }
            )
        return out

    def mark_late(self, ranks: list[RankState], plan: Record | None, *, active: bool) -> None:
        """`ranks`: of the last read. `active`: the run is starting or running. All ranks have the
        limit of the slowest phase, since the others may wait for it."""
        compiled = bool(dig(plan, "compile", "value"))
        beats = [self._beats[r["rank"]] for r in ranks if r["phase"] is not None]
        limit_s = max([LATE_S, *(phase_timeouts.own_s(b, compiled=compiled) for b in beats)])
        for rank in ranks:
            rank["late"] = (
                active
                and (rank["beat_age_s"] or 0) > limit_s
                and rank["phase"] != heartbeat.FINISHED
            )

    def _may_be_elsewhere(
        self, plan: Record | None, beat: heartbeat.HeartbeatRecord | None
    ) -> bool:
        """Whether this rank of another launcher, which no supervisor lists, may be on another
        machine: it has not been seen here."""
        place = dig(plan, "place", "kind"), dig(plan, "place", "local_world_size")
        if place[0] != RANK or place[1] == dig(plan, "place", "world_size") or beat is None:
            return False
        if self._here.get(beat.rank) == beat.pid:
            return False
        now, (pid, at) = time.monotonic(), self._looked.get(beat.rank, (0, 0.0))
        if pid == beat.pid and now - at < LOOK_S:
            return True
        self._looked[beat.rank] = beat.pid, now
        if not rank_process.writes(beat, self.run):
            return True
        self._here[beat.rank] = beat.pid
        return False

    def _listed(self, plan: Record, supervisor: Record) -> dict[int, Listed]:
        """The ranks that the supervisors have started. The newest file counts: after the loss of a
        machine the ranks have other numbers."""
        found: dict[int, Listed] = {}
        planned = whole(plan.get("ranks")) or 0
        for file, record in standing.supervisors(self.run, plan, supervisor):
            elsewhere = standing.other_host(plan, record) is not None
            for known in processes(record)[1:]:
                rank = whole(known.get("rank"))
                if rank is not None and (record is supervisor or rank < planned):
                    found[rank] = Listed(known, mtime(file), elsewhere)
        return found


def processes(supervisor: Record) -> list[Record]:
    """Those of supervisor.json, the supervisor first. With torchrun, only torchrun itself is listed
    besides: an entry without a rank."""
    listed = [supervisor, *items(supervisor.get("ranks"))]
    return [known for known in listed if isinstance(known, dict)]


def supervised(run: rundir.RunDir, plan: Record | None, supervisor: Record) -> list[bool]:
    """Which of processes(supervisor) run; empty without a supervisor, and if it is on another
    machine."""
    if not supervisor or standing.other_host(plan, supervisor):
        return []
    seen = mtime(run.supervisor) or time.time()
    has_processes = not (run.is_archived or standing.is_copy(run, plan))
    return [has_processes and host_stats.alive(known, seen) for known in processes(supervisor)]


def add_recorded(ranks: list[RankState], history: History) -> None:
    """Adds compute time and memory of each rank, which rank 0 records in metrics.jsonl."""
    own, memory = history.of_ranks("compute_ms"), history.of_ranks("memory_bytes")
    for rank in ranks:
        number = rank["rank"]
        rank["compute_ms_median"] = own[number] if 0 <= number < len(own) else None
        rank["memory_bytes"] = memory[number] if 0 <= number < len(memory) else None
