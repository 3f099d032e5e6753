"""Result of hang detection: the kind of hang and the guilty rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from training.core.messages import msg
from training.watchdog.probes.stacks import Stack
from training.watchdog.probes.waits import deciding

if TYPE_CHECKING:
    from training.core.contracts.kinds import HangKind
    from training.watchdog.rank_exit import RankExit

HANG: Final = "hang"
STOPPED: Final = "stopped"
BLOCKED: Final = "blocked"
DESYNC: Final = "desync"
UNEVEN: Final = "uneven"
# Reasons for no finding (NoFinding.code).
BLIND, QUIET, PAUSED, LOOPS = "no_stack", "quiet", "paused", "loops"
LOCKED = "locked_out"  # a rank waits for a lock that a program other than the ranks holds
MAY_END = "wait_may_end"  # one rank is in a sleep or a request, the others wait for it
WORKS, ADVANCES, ELSEWHERE, SINGLE = "works", "collectives_advance", "elsewhere", "single_rank"
UNDECIDED = frozenset({QUIET, LOOPS, MAY_END, LOCKED})  # a longer look may decide
SHORT, GPU_WORKS, FAILED = "too_few_samples", "gpu_works", "sampling_failed"
SHOWN_FRAMES = 10


@dataclass(frozen=True)
class NoFinding:
    """Why the ranks are not considered stuck: a code for decisions, a text for users."""

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class HangFinding:
    """`rank` is None where no rank can be blamed."""

    kind: HangKind
    rank: int | None
    where: str | None  # file:line of the guilty rank's own code
    how: str  # what the rank does, or what is wrong between the ranks
    waiting: dict[int, str]  # the other ranks → where they wait
    stacks: dict[int, Stack | str] = field(repr=False)
    since_s: float  # for how long the guilty rank has been there
    phase: str | None = None  # Duet's training only: the phase of the guilty rank
    folder: str | None = None  # stacks of all ranks
    # It waits for a timeout or for a process that is not a rank: only slow, perhaps.
    may_end: bool = False
    loops: bool = False  # it executes Python code without a pause, perhaps of long work
    # The guilty rank has failed, by the output of its launcher: the others wait in vain.
    death: RankExit | None = None
    # Exceptions that ranks have survived, where they differ in what they do.
    survived: tuple[str, ...] = ()

    @property
    def compares(self) -> bool:
        """Whether `how` is a sentence about all ranks, and not what the guilty one does."""
        return self.rank is None or self.kind == DESYNC

    def blaming(self, rank: int | None) -> HangFinding:
        """The same, with the rank that other evidence than stacks names."""
        if rank == self.rank:
            return self
        waiting = {one: place for one, place in self.waiting.items() if one != rank}
        return replace(self, rank=rank, where=None, phase=None, waiting=waiting)

    def short(self) -> str:
        """The guilty rank, what it does, and for how long."""
        if self.compares:
            return msg("watchdog.verdict.compared", how=self.how, since_s=self.since_s)
        return msg("watchdog.verdict.short", rank=self.rank, how=self.how, since_s=self.since_s)

    def sentence(self) -> str:
        """The finding in one line."""
        if self.rank is None:
            return msg(
                "watchdog.verdict.all", kind=self.kind.upper(), how=self.how, since_s=self.since_s
            )
        # `HANG rank 0 in 'backward'` in every language: ./duet diagnose reads it in logs
        doing = f" in '{self.phase}'" if self.phase else ""
        at = (
            msg("watchdog.verdict.at", where=self.where)
            if self.where and self.where not in self.how
            else ""
        )
        kind, how, since_s = self.kind.upper(), self.how, self.since_s
        if self.compares:
            return msg(
                "watchdog.verdict.odd_rank",
                kind=kind,
                rank=self.rank,
                doing=doing,
                at=at,
                how=how,
                since_s=since_s,
            )
        return msg(
            "watchdog.verdict.rank",
            kind=kind,
            rank=self.rank,
            doing=doing,
            how=how,
            at=at,
            since_s=since_s,
        )

    def others(self) -> str:
        return "; ".join(f"rank {rank}: {place}" for rank, place in sorted(self.waiting.items()))

    def evidence(self) -> list[str]:
        """What ranks have survived, and the stack of the guilty one, innermost frame first."""
        stack = self.stacks.get(self.rank) if self.rank is not None else None
        main = deciding(stack) if stack else None
        frames = [str(frame) for frame in main.frames[:SHOWN_FRAMES]] if main else []
        return [*self.survived, *frames]

    def texts(self) -> dict[int, str]:
        """The stacks as text, for files."""
        return {
            rank: stack if isinstance(stack, str) else stack.text()
            for rank, stack in self.stacks.items()
        }
