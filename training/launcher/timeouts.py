"""How long ranks get: for their last words, to stop when they are asked, to leave, to die."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from training.core import heartbeat, phases
from training.core.errors import Exit
from training.core.heartbeat import STEP_PHASES, HeartbeatRecord
from training.core.phase_timeouts import FIRST_STEPS, OWN
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.probes import procfs
from training.watchdog.start import RanksWatch

PEER_GRACE_S = 3.0  # what the others may still say after one has failed
SHORT_GRACE_S = 1.0  # the same where they know nothing that explains it
# who aborts may do so for another rank
EXPLAINED = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
)
STALL_S = 5.0  # after a wish to stop: ranks that make no progress for so long are killed
NOTICE_S = (
    30.0  # the same for a wish of the scheduler, whose own SIGKILL comes 30 to 120 s after it
)
SAVING_S = 600.0  # so long may a part of a checkpoint take
# phases of a rank that may take long, and must not be cut short
SAVING = (
    "gather state",
    "checkpoint",
)
CLOSING_S = 30.0  # between the last rank's regular end and its process's
UNKILLABLE_S = 20.0  # after SIGKILL; a process with much GPU memory needs some seconds
GONE_S = 5.0  # torchrun tells within a second of a rank that has failed


def grace_s(guilty: tuple[int | None, int] | None) -> float:
    """After this death, before the others are killed. Of some signals it is known that the others
    have nothing to tell."""
    status = guilty[1] if guilty else 0
    return SHORT_GRACE_S if -status in EXPLAINED else PEER_GRACE_S


def silent(beats: Sequence[HeartbeatRecord], asked: Exit, watch: RanksWatch) -> bool:
    """After a wish to stop: does nobody do anything about it? Whoever saves may take his time."""
    if any(beat.phase in SAVING for beat in beats):
        return min(beat.age_s for beat in beats) > SAVING_S
    return all(beat.age_s > patience_s(beat, asked, watch) for beat in beats)


def patience_s(beat: HeartbeatRecord, asked: Exit, watch: RanksWatch) -> float:
    """With a rank that was asked to stop. Ctrl-C is a person's, who can insist; a scheduler can
    not, and the steps since the last checkpoint would be lost: then a phase that is slow by nature
    gets its whole budget."""
    usual = max(STALL_S, watch.patience_s(beat))
    if asked != Exit.PREEMPTED:
        return usual
    budget = watch.budget_s(beat)
    # compilers, allocators, caches
    first = beat.phase in STEP_PHASES and beat.step < beat.first_step + FIRST_STEPS
    return max(
        usual, budget if first or heartbeat.kind(beat.phase) in OWN else min(budget, NOTICE_S)
    )


def still_s(beats: Sequence[HeartbeatRecord], watch: RanksWatch) -> float:
    """For how long all ranks here have waited for others, and longer than they usually do. One that
    evaluates, saves or fetches data may be in its phase for long by itself."""
    working = [beat for beat in beats if beat.phase != heartbeat.FINISHED]
    return min(
        (beat.age_s if _waits_too_long(beat, watch) else 0.0 for beat in working), default=0.0
    )


def _waits_too_long(beat: HeartbeatRecord, watch: RanksWatch) -> bool:
    by_itself = heartbeat.kind(beat.phase) in OWN or (
        beat.phase in STEP_PHASES and beat.step < beat.first_step + FIRST_STEPS
    )
    return phases.waits(beat.phase) and beat.age_s > (
        watch.budget_s(beat) if by_itself else watch.patience_s(beat)
    )


class Gone:
    """Finds a rank of torchrun's that has left with status 0 in the middle of its work: torchrun
    takes that for a regular end, and the others wait for it."""

    def __init__(self, floor_s: float) -> None:
        self._limit_s = max(floor_s, GONE_S)
        self._since: dict[int, float] = {}  # pid → when it was first seen to be gone

    def look(self, beats: Sequence[HeartbeatRecord]) -> HangFinding | None:
        """`beats`: of this machine's ranks, read before this call. What a rank wrote last may be
        newer: the next look has it."""
        now = time.monotonic()
        left = {
            beat.pid: beat for beat in beats if beat.phase != heartbeat.FINISHED and has_left(beat)
        }
        self._since = {pid: self._since.get(pid, now) for pid in left}
        for pid, beat in left.items():
            if now - self._since[pid] > GONE_S and beat.age_s > self._limit_s:
                waiting = {b.rank: str(b) for b in beats if b.rank != beat.rank}
                return HangFinding(
                    HANG,
                    beat.rank,
                    None,
                    "is gone in the middle of its work",
                    waiting,
                    {},
                    beat.age_s,
                    str(beat),
                )
        return None


def has_left(beat: HeartbeatRecord) -> bool:
    """Of this machine. Only what is certain: a /proc that cannot be read proves nothing."""
    process = procfs.read_process(beat.pid)
    return process.state in "ZX" if process else not Path(f"/proc/{beat.pid}").exists()


def unkillable(name: str, pid: int) -> str:
    place = (process := procfs.read_process(pid)) and process.waits_in
    return (
        f"{name} (pid {pid}) can not be ended: it is blocked in the "
        f"kernel{f' ({place})' if place else ''}"
    )
