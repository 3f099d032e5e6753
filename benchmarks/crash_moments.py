"""Victims and moments of kills, detected from outside a running run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.core import heartbeat, phases
from training.core.rundir import RunDir, read_json

LAUNCHER, SUPERVISOR, GUARDIAN, WORKER, EVERYTHING = (
    "launcher",
    "supervisor",
    "guardian",
    "worker",
    "everything",
)
WRITING, REMOVING, TIME = (
    "a checkpoint is being written",
    "a checkpoint is being removed",
    "any time",
)
# Target phases, in the order of a run; the phase that was hit is read afterwards.
STARTING = (
    "importing torch",
    "rendezvous with the other ranks",
    "waiting for data",
    "building the model",
)
EPOCH = (
    "barrier: epoch #: synchronise",
    "epoch #: creating data iterator",
    "barrier: before iteration",
)
CLOSING = ("barrier: end of training", "sample")
LOOP = (*heartbeat.STEP_PHASES, "evaluation", "gather state", "checkpoint")
PHASES = (*STARTING, *EPOCH, *LOOP, *CLOSING)
STEPS, SAVE_EVERY, EVAL_EVERY = 48, 5, 15
KEPT = 2  # checkpoints
EVERY = {
    "evaluation": EVAL_EVERY,
    **dict.fromkeys(("gather state", "checkpoint", WRITING, REMOVING), SAVE_EVERY),
}
# Approximate duration of a phase: the kill is anywhere in it. The others last a fraction of a
# millisecond, so often the next phase is hit.
LASTS_S = {
    "importing torch": 0.9,
    "rendezvous with the other ranks": 0.05,
    "building the model": 0.05,
}
LASTS_S |= {"evaluation": 0.003, "checkpoint": 0.003, WRITING: 0.01, REMOVING: 0.0005}
LONG_S = 0.02
SHORT_S = 3e-4
ANY_TIME_S, PLANNING_S = 3.0, 0.4
STEPS_ON = 10  # longest wait for a phase of a step, in steps
POLL_S = 2e-4
LIMIT_S = 60.0  # longer than anything takes
# Victims of one round; `rank` is any rank.
ROUND = (
    "rank",
    "rank",
    "rank",
    "rank",
    SUPERVISOR,
    SUPERVISOR,
    LAUNCHER,
    GUARDIAN,
    WORKER,
    EVERYTHING,
)


def kind_of(beat: heartbeat.HeartbeatRecord) -> str:
    """The kind of its phase; all evaluations are one kind."""
    kind = heartbeat.kind(beat.phase)
    return phases.EVALUATION if kind in phases.EVALUATIONS else kind


@dataclass(frozen=True)
class Moment:
    """`delay_s` after `phase` (of kind_of, or WRITING) was seen on `rank`; with TIME, after
    the start."""

    victim: str
    rank: int
    phase: str
    steps_on: int
    delay_s: float

    def first_step(self, origin: int) -> int:
        """First step with this phase in a training that continues from `origin`; 0: from the
        start."""
        first = 0
        if self.phase in heartbeat.STEP_PHASES:
            first = origin + self.steps_on
        elif self.phase in EVERY:
            first = -(-(origin + self.steps_on) // EVERY[self.phase]) * EVERY[self.phase]
        elif self.phase in EPOCH and self.steps_on % 2:  # not the first epoch of this start
            first = origin + 1
        elif self.phase in CLOSING:
            first = STEPS
        return min(first, STEPS) if origin < STEPS else 0

    def now(self, phase: str, step: int, first: int, seen: bool) -> bool:
        """Whether the moment is now, or was missed and cannot recur: then a kill now is as good.
        `seen`: phase detected without a heartbeat."""
        if step < first:
            return False
        again = self.phase in (*LOOP, WRITING, REMOVING) or (self.phase in EPOCH and first > 0)
        missed = CLOSING if again else PHASES[PHASES.index(self.phase) :]
        return seen or phase in (self.phase, *missed, heartbeat.FINISHED)

    def soon(self, phase: str, step: int, first: int) -> bool:
        """Whether polling every POLL_S is now too slow."""
        if LASTS_S.get(self.phase, SHORT_S) >= LONG_S:
            return False
        return (
            step >= first - 1
            if first
            else phase in PHASES[PHASES.index(self.phase) - 1 :]
            if self.phase in PHASES
            else phase in LOOP
        )


class Dealer:
    """Draws moments with every victim in each round, and phases with few hits first."""

    def __init__(self, choice: random.Random, ranks: int) -> None:
        self.choice, self.ranks = choice, ranks
        self.hit: Counter[str] = Counter()  # phases that were hit
        self.aimed: Counter[str] = Counter()
        self._round: list[str] = []

    def draw(self, *, supervised: bool, training: bool) -> Moment:
        """`supervised`: the launch script has become the supervisor; `training`: the ranks are
        training."""
        if not self._round:
            self._round = self.choice.sample(ROUND, len(ROUND))
        at = next(
            (i for i, victim in enumerate(self._round) if victim != LAUNCHER or not supervised),
            None,
        )
        victim = "rank" if at is None else self._round.pop(at)
        rank, steps, share = (
            self.choice.randrange(self.ranks),
            self.choice.randint(1, STEPS_ON),
            self.choice.random(),
        )
        if victim == "rank":
            victim = f"rank {rank}"
        if victim == LAUNCHER:
            return Moment(victim, rank, TIME, 0, self.choice.uniform(0, PLANNING_S))
        if share < 0.15 and not training:
            return Moment(victim, rank, TIME, 0, self.choice.uniform(0, ANY_TIME_S))
        # Workers exist only between those phases, and the supervisor must first run without its
        # guardian.
        phases = LOOP if training or victim in (WORKER, GUARDIAN) else PHASES
        files = WRITING if share < 0.25 else REMOVING if share < 0.35 else ""
        phase = files or min(
            phases, key=lambda p: (self.hit[p] + self.aimed[p] // 3, self.choice.random())
        )
        self.aimed[phase] += 1
        return Moment(
            victim, rank, phase, steps, self.choice.uniform(0, LASTS_S.get(phase, SHORT_S))
        )


class Watched:
    """A started launch script and its processes, all descendants of this process, including
    orphans."""

    def __init__(self, popen: subprocess.Popen[bytes], run: RunDir, ranks: int) -> None:
        self.popen, self.run, self.started = popen, run, time.monotonic()
        self._ranks, self._pids = ranks, {}  # type: tuple[int, dict[int, int]]

    def ended(self, limit_s: float) -> bool:
        return wait(lambda: not self.running, limit_s)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def supervises(self) -> bool:
        """Whether the launch script has become the supervisor."""
        return b"training.cli.supervise" in _read(f"/proc/{self.popen.pid}/cmdline")

    def rank_pids(self) -> dict[int, int]:
        """rank → pid of the current attempt; empty before its start."""
        known = read_json(self.run.supervisor) or {}
        return (
            {r["rank"]: r["pid"] for r in known["ranks"]}
            if known.get("pid") == self.popen.pid
            else {}
        )

    def beat(self, rank: int) -> heartbeat.HeartbeatRecord | None:
        """Heartbeat of the current attempt: files of earlier ones are still there."""
        found = heartbeat.read(self.run.heartbeat(rank))
        if found and self._pids.get(rank) != found.pid:
            self._pids = self.rank_pids()
        return found if found and self._pids.get(rank) == found.pid else None

    def begun(self) -> int:
        """The highest step that a rank of the current attempt has begun."""
        return max(
            (beat.step for rank in range(self._ranks) if (beat := self.beat(rank))), default=0
        )

    def phases(self) -> str:
        """Phases of the ranks, for messages."""
        return ", ".join(f"rank {rank}: {self.beat(rank)}" for rank in range(self._ranks))

    def wait_for(self, moment: Moment, saved: int) -> list[int] | None:
        """Waits for the moment in a training that continues from step `saved`; returns the PIDs to
        kill, empty if it can no longer occur, None after LIMIT_S."""
        first, soon, now = moment.first_step(max(saved, self.begun())), False, ""
        end = time.monotonic() + LIMIT_S
        while self.running:
            if time.monotonic() > end:
                return None
            if moment.phase == TIME:
                arrived = time.monotonic() - self.started >= moment.delay_s
            else:
                beat = self.beat(moment.rank)
                now, step = (kind_of(beat), beat.step) if beat else ("", -1)
                arrived, soon = (
                    moment.now(now, step, first, self._seen(moment.phase)),
                    moment.soon(now, step, first),
                )
            if arrived:
                if moment.phase != TIME:
                    _spin(moment.delay_s)
                if pids := self.victims(moment):
                    return pids
                if moment.victim == WORKER and now in CLOSING:
                    break
            if not soon:
                time.sleep(POLL_S)
        return []

    def _seen(self, phase: str) -> bool:
        """Whether the checkpoint folder shows WRITING or REMOVING."""
        if phase not in (WRITING, REMOVING):
            return False
        with suppress(OSError):
            names = os.listdir(self.run.checkpoints)
            half = sum(name.startswith(".") for name in names)
            return half > 0 if phase == WRITING else len(names) - half > KEPT
        return False

    def victims(self, moment: Moment) -> list[int]:
        """PIDs of the victims that are alive now."""
        if moment.victim == LAUNCHER or (moment.victim == SUPERVISOR and self.supervises):
            return [self.popen.pid]
        if moment.victim == EVERYTHING:
            return [self.popen.pid, *below(self.popen.pid)] if self.supervises else []
        if moment.victim == GUARDIAN:
            return [
                pid
                for pid in children(self.popen.pid)
                if b"guardian.py" in _read(f"/proc/{pid}/cmdline")
            ]
        beat = self.beat(moment.rank) if moment.victim != SUPERVISOR else None
        if beat is None:
            return []
        workers = (
            pid for pid in children(beat.pid) if b"train.py" in _read(f"/proc/{pid}/cmdline")
        )
        return list(workers)[:1] if moment.victim == WORKER else [beat.pid]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Child PIDs, within microseconds: without a walk through all processes."""
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            int(child)
            for thread in threads
            for child in _read(f"/proc/{pid}/task/{thread}/children").split()
        ]
    return []


def below(pid: int) -> list[int]:
    return list(_below(pid))


def _below(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _below(child)


def alive(pids: list[int]) -> list[int]:
    """PIDs that are neither gone nor zombies."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def described(pids: list[int]) -> str:
    return "; ".join(
        f"{pid} ({_state(pid)}) "
        f"{_read(f'/proc/{pid}/cmdline').replace(bytes(1), b' ').decode(errors='replace')}"
        for pid in pids
    )


def reap(spared: int) -> list[int]:
    """Living descendants of this process; reaps ended orphans, except `spared`, which has its own
    waiter."""
    found = below(os.getpid())
    for pid in found:
        if pid != spared and _state(pid) == "Z":
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return alive(found)


def wait(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def _state(pid: int) -> str:
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1].decode()


def _read(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _spin(seconds: float) -> None:
    """Busy wait: a sleep would return up to 0.1 ms late."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
