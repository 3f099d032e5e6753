"""Activity of each rank between two observations a moment apart: evidence of progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from training.core import heartbeat
from training.core.heartbeat import HeartbeatRecord
from training.core.rundir import RunDir
from training.monitor.health.target import Target
from training.watchdog import compared_calls
from training.watchdog.probes import flight_recorder, graph_capture, procfs
from training.watchdog.probes.procfs import Process
from training.watchdog.probes.sampling import Sample, take
from training.watchdog.probes.trace import IDLE_SHARE, RankTrace, courses

LEAST_S, LOOK_S, MOST_S = 1.0, 2.0, 30.0  # an observation: shortest, usual, longest (long steps)
STEPS = 3  # an observation covers this many usual steps
MORE_S = 4.0  # extra time if nothing has moved, since any rank may pause for a moment
EVERY_S = 0.1
SAMPLES = 5  # of the processes of a training without heartbeats


@dataclass(frozen=True)
class RankActivity:
    """One rank during the observation. `pid`: None on another machine; `states`: of its main
    thread, one letter for each sample."""

    rank: int
    pid: int | None
    before: HeartbeatRecord | None = None
    after: HeartbeatRecord | None = None
    states: str = ""
    cpu: float | None = None  # share of a core, with its children
    course: RankTrace | None = None
    calls: tuple[int, int] | None = None  # collectives called so far, before and after

    @property
    def stopped(self) -> bool:
        return bool(self.states) and not set(self.states) - set("Tt")

    @property
    def gone(self) -> bool:
        return self.pid is not None and self.states.endswith("Z")

    @property
    def stepped(self) -> bool:
        """It has completed a step and begun the next."""
        return bool(
            self.before
            and self.after
            and self.after.step > max(self.before.step, self.after.first_step)
        )

    @property
    def moved(self) -> bool:
        """It has entered another phase."""
        return bool(self.before and self.after and self.after.beats != self.before.beats)

    @property
    def busy(self) -> bool:
        return self.cpu is not None and self.cpu > IDLE_SHARE


@dataclass
class ActivityWindow:
    """Result of an observation. `samples`: only for a training without heartbeats."""

    motions: dict[int, RankActivity]
    seconds: float
    samples: list[Sample] = field(default_factory=list)


def window_s(usual_step_s: float | None) -> float:
    return min(MOST_S, max(LOOK_S, STEPS * (usual_step_s or 0.0)))


def at_heartbeats(target: Target, usual_step_s: float | None) -> ActivityWindow:
    """Ends as soon as every rank has begun another step; takes MORE_S longer if one has not."""
    run = target.run
    assert run is not None
    begun, first, processes = time.monotonic(), _beats(run, target), _processes(target.pids)
    states = {rank: process.state if process else "Z" for rank, process in processes.items()}
    limit = window_s(usual_step_s)
    while True:
        time.sleep(EVERY_S)
        now, seconds = _beats(run, target), time.monotonic() - begun
        for rank, pid in target.pids.items():
            states[rank] += process.state if (process := procfs.read_process(pid)) else "Z"
        motions = {
            rank: RankActivity(
                rank, target.pids.get(rank), first.get(rank), now.get(rank), states.get(rank, "")
            )
            for rank in range(target.world or len(target.pids))
        }
        if seconds < LEAST_S:
            continue
        if all(m.stepped for m in motions.values() if m.pid or m.before) or any(
            m.gone for m in motions.values()
        ):
            break
        if seconds >= LOOK_S and any(m.stopped for m in motions.values()):
            break
        if seconds >= limit + MORE_S:
            break
    for rank, before in processes.items():
        if before and (after := procfs.read_process(before.pid)):
            motions[rank] = replace(motions[rank], cpu=(after.cpu_s - before.cpu_s) / seconds)
    return ActivityWindow(motions, seconds)


def _beats(run: RunDir, target: Target) -> dict[int, HeartbeatRecord]:
    """Heartbeats of this start, without those left by an earlier one."""
    since = target.plan.get("created")
    found = heartbeat.read_all(run.heartbeats, range(target.world or len(target.pids)))
    return {
        b.rank: b
        for b in found
        if (
            b.pid == target.pids[b.rank]
            if b.rank in target.pids
            else isinstance(since, float) and b.wall_time >= since
        )
    }


def _processes(pids: Mapping[int, int]) -> dict[int, Process | None]:
    return {rank: procfs.read_process(pid) for rank, pid in pids.items()}


def at_processes(target: Target, seconds: float) -> ActivityWindow:
    """Observation of any training: stacks, CPU, I/O and, if recorded, collectives."""
    calls, begun = _calls(target), time.monotonic()
    samples = [take(target.pids)]
    for number in range(1, SAMPLES):
        time.sleep(max(0.0, begun + seconds * number / (SAMPLES - 1) - time.monotonic()))
        samples.append(take(target.pids))
    later, seen = _calls(target), courses(samples)
    motions = {}
    for rank, pid in target.pids.items():
        course = seen.get(rank)
        known = (calls[rank], later[rank]) if rank in calls and rank in later else None
        if course is None:
            motions[rank] = RankActivity(rank, pid, states="Z", calls=known)
            continue
        states = "".join(look.process.state for look in course.looks)
        motions[rank] = RankActivity(
            rank, pid, None, None, states, course.own_cpu + course.childrens_cpu, course, known
        )
    return ActivityWindow(motions, time.monotonic() - begun, samples)


def join(earlier: ActivityWindow, later: ActivityWindow) -> ActivityWindow:
    """Two consecutive observations of the same processes as one."""
    motions = {}
    samples = [*earlier.samples, *later.samples]
    seen = courses(samples)
    for rank, last in later.motions.items():
        first, course = earlier.motions[rank], seen.get(rank)
        calls = (first.calls[0], last.calls[1]) if first.calls and last.calls else None
        cpu = course.own_cpu + course.childrens_cpu if course else None
        motions[rank] = replace(
            last, states=first.states + last.states, course=course, cpu=cpu, calls=calls
        )
    return ActivityWindow(motions, earlier.seconds + later.seconds, samples)


def _calls(target: Target) -> dict[int, int]:
    """rank → number of collectives called so far; recorded only under Duet's launcher."""
    if target.run is None or graph_capture.capturing(target.pids.values()):
        return {}
    found = {rank: flight_recorder.read(target.run.ranks, rank) for rank in target.pids}
    return compared_calls.counts(
        {rank: calls for rank, calls in found.items() if calls is not None}
    )
