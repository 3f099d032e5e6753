"""Two looks at each rank, a moment apart. What has changed between them is the proof that it goes
on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from training.core import heartbeat
from training.core.heartbeat import HeartbeatRecord
from training.core.rundir import RunDir
from training.monitor.health.target import Target
from training.watchdog.probes import flight_recorder, procfs
from training.watchdog.probes.procfs import Process
from training.watchdog.probes.sampling import IDLE_SHARE, RankTrace, Sample, courses, take

LEAST_S, LOOK_S, MOST_S = 1.0, 2.0, 30.0  # a look takes so long at least; usually; for long steps
STEPS = 3  # usual ones that are waited for
MORE_S = 4.0  # where nothing has moved, so much more: that is a pause that anybody may make
EVERY_S = 0.1
SAMPLES = 5  # of a training that tells nothing of itself


@dataclass(frozen=True)
class RankActivity:
    """One rank between the first look and the last. `pid` is None for a rank of another machine;
    `states` are its main thread's."""

    rank: int
    pid: int | None
    before: HeartbeatRecord | None = None
    after: HeartbeatRecord | None = None
    states: str = ""
    cpu: float | None = None  # share of a core, with its children
    course: RankTrace | None = None
    calls: tuple[int, int] | None = None  # collectives that it had asked for by then

    @property
    def stopped(self) -> bool:
        return bool(self.states) and not set(self.states) - set("Tt")

    @property
    def gone(self) -> bool:
        return self.pid is not None and self.states.endswith("Z")

    @property
    def stepped(self) -> bool:
        """It has begun a step after one that it has done."""
        return bool(
            self.before
            and self.after
            and self.after.step > max(self.before.step, self.after.first_step)
        )

    @property
    def went_on(self) -> bool:
        """To another phase."""
        return bool(self.before and self.after and self.after.beats != self.before.beats)

    @property
    def busy(self) -> bool:
        return self.cpu is not None and self.cpu > IDLE_SHARE


@dataclass
class ActivityWindow:
    """What a look has seen. `samples` only of a training that tells nothing of itself."""

    motions: dict[int, RankActivity]
    seconds: float
    samples: list[Sample] = field(default_factory=list)


def window_s(usual_step_s: float | None) -> float:
    return min(MOST_S, max(LOOK_S, STEPS * (usual_step_s or 0.0)))


def at_heartbeats(target: Target, usual_step_s: float | None) -> ActivityWindow:
    """Ends as soon as every rank has begun a further step; goes on for MORE_S when one has not."""
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
    """Those of this start alone: an earlier one has left its own."""
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
    """By stacks, CPU, I/O and, where they tell, the ranks' collectives: what can be seen of any
    training."""
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
    """Two looks at the same processes, as one."""
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
    """rank → how many collectives it has asked for so far; a script under our launcher tells,
    others do not."""
    if target.run is None:
        return {}
    found = {rank: flight_recorder.read(target.run.ranks, rank) for rank in target.pids}
    return flight_recorder.counts(
        {rank: calls for rank, calls in found.items() if calls is not None}
    )
