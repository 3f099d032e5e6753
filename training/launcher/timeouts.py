"""How long ranks get: to explain a failure, to stop, to exit, to die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from training.core import heartbeat, phases
from training.core.errors import Exit
from training.core.heartbeat import STEP_PHASES, HeartbeatRecord
from training.core.messages import msg
from training.core.phase_timeouts import FIRST_STEPS, OWN
from training.host.platform_env import SHUTDOWN
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.probes import procfs
from training.watchdog.start import RanksWatch

PEER_GRACE_S = 3.0  # for the other ranks to report after one has failed
SHORT_GRACE_S = 1.0  # the same where they have nothing to report
SHUTDOWN_S = 30.0  # after that, to save at SIGTERM; torchrun's limit
# a rank may abort because of another one
EXPLAINED = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
)
STALL_S = 5.0  # after a stop request: ranks without progress for that long are killed
RESIZE_S = 30.0  # a script that is ended to start again with other ranks; torchrun's limit
NOTICE_S = (
    30.0  # the same after a request of the scheduler, whose own SIGKILL follows after 30 to 120 s
)
SAVING_S = 600.0  # limit of one part of a checkpoint, of the summary and the sample
# slow phases that must not be interrupted
SAVING = (
    "gather state",
    "checkpoint",
    "summary",
    "sample",
)
CLOSING_S = 30.0  # between the last rank's regular end and the exit of its process
# Between the exception that ends a rank's script and the exit of its process: while another rank
# may wait for it or nothing happens, and while none does (an atexit function may upload results).
RAISED_S, RAISED_ALONE_S = 30.0, 600.0
# The same of a rank of Duet, which closes its trackers and exits, unless the driver blocks it.
RAISED_OWN_S = 15.0
UNKILLABLE_S = 20.0  # after SIGKILL; a process with much GPU memory needs some seconds
GONE_S = 5.0  # torchrun reports a failed rank within a second


def grace_s(guilty: tuple[int | None, int] | None) -> float:
    """Grace of the other ranks after this exit, in seconds; short for signals about which they have
    nothing to report."""
    status = guilty[1] if guilty else 0
    return SHORT_GRACE_S if -status in EXPLAINED else PEER_GRACE_S


def shutdown_s() -> float:
    """How long ranks of a script may save after the failure of another one, in seconds."""
    text = os.environ.get(SHUTDOWN, "")
    return float(text) if text.isdecimal() else SHUTDOWN_S


def silent(beats: Sequence[HeartbeatRecord], asked: Exit, watch: RanksWatch) -> bool:
    """After a stop request: does no rank react to it? A rank that saves has its own limit."""
    if any(beat.phase in SAVING for beat in beats):
        return min(beat.age_s for beat in beats) > SAVING_S
    return all(beat.age_s > patience_s(beat, asked, watch) for beat in beats)


def patience_s(beat: HeartbeatRecord, asked: Exit, watch: RanksWatch) -> float:
    """Limit of a rank that was asked to stop, in seconds. After Ctrl-C a user can insist; a
    scheduler cannot, and the steps since the last checkpoint would be lost: a phase that is slow by
    nature gets its whole budget."""
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
    """For how long all ranks of this machine have waited for others, longer than usual. A rank that
    evaluates, saves or fetches data may be slow by itself."""
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
    """Finds a rank under torchrun that exited with status 0 during its work: torchrun takes that
    for a regular end, and the others wait for it."""

    def __init__(self, floor_s: float) -> None:
        self._limit_s = max(floor_s, GONE_S)
        self._since: dict[int, float] = {}  # PID → when it was first seen to have exited

    def look(self, beats: Sequence[HeartbeatRecord]) -> HangFinding | None:
        """`beats`: of this machine's ranks, read before this call. The last heartbeat of a rank may
        be newer: the next look reads it."""
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
                    msg("launcher.failure.left"),
                    waiting,
                    {},
                    beat.age_s,
                    str(beat),
                )
        return None


def has_left(beat: HeartbeatRecord) -> bool:
    """Has this rank of this machine exited? An unreadable /proc proves nothing."""
    process = procfs.read_process(beat.pid)
    return process.state in "ZX" if process else not Path(f"/proc/{beat.pid}").exists()
