"""A failure as the recovery policies see it, and what they decide."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.core.cause_ids import EXIT_STATUS, KILLED, RAISED, SEGFAULT, UNKNOWN
from training.core.messages import msg
from training.watchdog.rank_exit import DIED

if TYPE_CHECKING:
    from training.core.contracts.kinds import FailureKind, FieldValues
    from training.core.contracts.plan import LostRank
    from training.launcher.script_snapshot import Snapshot

SIGNALS = {signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}
# the summary is more specific than these
BY_ITSELF = {UNKNOWN, RAISED, EXIT_STATUS, SEGFAULT, KILLED}


@dataclass(frozen=True)
class Failure:
    """How an attempt ended."""

    cause: str
    kind: FailureKind
    rank: int | None
    status: int
    step: int  # that had been started
    saved: int  # step of the newest checkpoint
    phase: str
    summary: str
    changed: bool = False  # the plan was changed after it
    gone: tuple[int, ...] = ()  # ranks whose GPU the driver no longer lists
    nodes: tuple[int, ...] = ()  # machines that are lost
    # planned numbers of lost ranks whose machine has joined again
    back: tuple[int, ...] = ()
    # machines that were lost by this failure and have joined again
    returned: tuple[int, ...] = ()
    suspect_gpu: bool = False  # the GPU of `rank` may be defective
    worker: bool = False  # a data-loader worker of `rank` lacked memory, not the rank itself
    oom_kill: bool = False  # the kernel killed `rank`, or a process below it, for lack of memory
    spawns: bool = False  # each of several ranks has started all ranks itself
    occupied: bool = False  # other processes have exhausted the GPU of `rank`
    blocked: str = ""  # ranks of any machine that even SIGKILL does not end
    snapshot: Snapshot | None = None  # newest one of a script
    printed: tuple[int, ...] = ()  # the last two steps that a script has printed

    def same(self, other: Failure) -> bool:
        return (self.cause, self.kind, self.rank, self.status, self.step) == (
            other.cause,
            other.kind,
            other.rank,
            other.status,
            other.step,
        )

    @property
    def lost(self) -> int:
        """Steps to repeat; one that was only started counts."""
        return self.step - self.saved

    def __str__(self) -> str:
        return msg(
            "launcher.retry.failure_at",
            summary=self.summary if self.cause in BY_ITSELF else self.cause,
            step=self.step,
        )


@dataclass(frozen=True)
class Team:
    """The ranks of a start. `seats`: their planned numbers, in the order of ranks; `lost`: added to
    those that the run no longer uses, `back`: removed from them; `size`: device_batch_size, None
    for a script."""

    seats: tuple[int, ...]
    lost: tuple[LostRank, ...] = ()
    size: int | None = None
    back: tuple[int, ...] = ()


@dataclass(frozen=True)
class Restart:
    """`number`: of consecutive restarts, 0 for one that does not count. `changes`: fields of the
    configuration with their new values; `why` for the plan, `label` for the console; `team`: other
    ranks than before."""

    number: int
    changes: FieldValues = field(default_factory=dict)
    why: str = ""
    label: str = ""
    pause_s: float = 0.0
    team: Team | None = None


@dataclass(frozen=True)
class GiveUp:
    """`reason` is '' where no restart was requested. `hand_over`: another machine may continue the
    run; `too_few`: this one may once others have joined."""

    reason: str
    hand_over: bool = False
    too_few: bool = False


def killed(failure: Failure) -> bool:
    """Whether a signal that may not come again has ended a rank, or a process below it that lacked
    memory."""
    return failure.oom_kill or (failure.kind == DIED and -failure.status in SIGNALS)
