"""The rank that failed first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from training.diagnose import rank_table
from training.diagnose.enqueued import Member, slowest
from training.diagnose.events import LOST, UNLISTED, Event
from training.diagnose.log_analysis import LogAnalysis
from training.diagnose.signatures import CASCADE, ROOT, VICTIM, WEAK

PID = re.compile(r"\bpid[=: ]+(\d+)", re.I)
# A CUDA call of the rank itself blocks; in several, the driver may wait for the same collective.
WATCHDOG = "distributed.nccl.heartbeat"
TABLE = 4  # lines between a rank in torchrun's table and its exit status


def guilty_rank(
    best: Event, events: Sequence[Event], analyses: Sequence[LogAnalysis]
) -> int | None:
    """The rank of `best`. For a line without a rank: from the name of its log, then from the
    process that spawned it, then torchrun's first failure."""
    analysis = best.analysis
    if best.role == LOST and best.hit is None:
        return best.rank  # a launcher's first failure
    if rank_table.names_task(best.line) and any(a.launcher for a in analyses):
        return None
    reported = [r for r in analysis.reported if not r.task] if analysis else []
    near = [r for r in reported if abs(r.line.number - best.line.number) <= TABLE]
    if near and best.role == LOST and (roots := [r for r in reported if r.root]):
        return roots[0].rank
    if near and best.rank is None:
        return min(near, key=lambda r: abs(r.line.number - best.line.number)).rank
    if best.role in (VICTIM, CASCADE, LOST):
        return _missing(best, events, analyses)
    if best.signature and best.signature.id == WATCHDOG and len(_reporters(best, events)) > 1:
        return None
    if best.hit and "against" in best.hit.groups:
        return _odd_one_out(best, events)
    if best.rank is not None or analysis is None:
        return best.rank
    if analysis.source.rank is not None:
        return analysis.source.rank
    before = [rank for offset, rank in analysis.spawned if offset < best.line.offset]
    if (best.thrown and before) or len(analysis.spawned) == 1:
        return before[-1] if before else analysis.spawned[0][1]
    # Lines of C++ and of the kernel have no rank prefix; the exception that follows has one.
    broken = [
        e
        for e in events
        if e.rank is not None and e.role in (ROOT, WEAK, UNLISTED) and e.analysis is analysis
    ]
    same = [e for e in broken if e.cause == best.cause] or [
        e for e in broken if e.thrown and e.line.offset > best.line.offset
    ]
    if same:
        return min(same, key=lambda e: e.line.offset).rank
    return _of_table(best, analysis, waiting_ranks(events))


def forget_tasks(analyses: Sequence[LogAnalysis]) -> None:
    """The tasks of srun are machines, not ranks, if any log has lines of their launchers."""
    if not any(analysis.launcher for analysis in analyses):
        return
    for analysis in analyses:
        analysis.reported = [r for r in analysis.reported if not r.task]
        for hit in analysis.hits:
            if rank_table.names_task(hit.line):
                hit.rank = None


def _reporters(best: Event, events: Sequence[Event]) -> set[int | None]:
    """Ranks with the same message."""
    return {e.rank for e in events if e.signature == best.signature}


def _odd_one_out(best: Event, events: Sequence[Event]) -> int | None:
    """The rank with which several others disagree. Of two that differ, either may be wrong."""
    reports = [e for e in events if e.cause == best.cause and e.hit and "against" in e.hit.groups]
    reporters = {e.rank for e in reports}
    others = {int(e.hit.groups["against"]) for e in reports if e.hit} - reporters
    return next(iter(others)) if len(reporters) > 1 and len(others) == 1 else None


def waiting_ranks(events: Sequence[Event]) -> set[int]:
    """Ranks that report a wait for other ranks, or their loss."""
    ranks = {
        e.analysis.source.rank if e.rank is None and e.analysis else e.rank
        for e in events
        if e.role in (VICTIM, CASCADE, LOST) and not _reports_an_end(e)
    }
    return {rank for rank in ranks if rank is not None}


def _reports_an_end(event: Event) -> bool:
    """Whether a launcher has printed this line, about the end of a rank."""
    reported = event.analysis.reported if event.analysis else []
    return any(r.line.offset == event.line.offset for r in reported)


def _of_table(best: Event, analysis: LogAnalysis, waiting: set[int]) -> int | None:
    """From torchrun's table: the rank of the PID in the line; else its first failure, unless that
    rank only waited."""
    named = {int(pid) for pid in PID.findall(best.line.text)}
    later = [r for r in analysis.reported if r.line.offset > best.line.offset and not r.task]
    of_process = [r.rank for r in later if r.pid in named]
    broken = [r.rank for r in later if r.rank not in waiting]
    first = [r.rank for r in later if r.root and r.rank in broken]
    return next(iter([*of_process, *first, *broken]), None)


def _enqueued(analysis: LogAnalysis, events: Sequence[Event]) -> dict[Member, int]:
    """Number of the last collective that each rank had enqueued when it failed, not in a failure
    after which training continued."""
    failures = [e.line.offset for e in events if e.analysis is analysis]
    if not failures:
        return {}
    if not analysis.marks:  # that of the last failure
        return {e.member: e.number for e in analysis.enqueued}
    since = max((m.offset for m in analysis.marks if m.offset < min(failures)), default=-1)
    first: dict[Member, int] = {}
    for one in analysis.enqueued:
        if one.offset > since:
            first.setdefault(one.member, one.number)
    return first


def _missing(best: Event, events: Sequence[Event], analyses: Sequence[LogAnalysis]) -> int | None:
    """The rank that all others wait for: the one with the fewest collectives, else the only one
    that reports no wait."""
    if best.hit and best.hit.groups.get("rank", "").isdigit():
        return int(best.hit.groups["rank"])
    enqueued: dict[Member, int] = {}
    for analysis in analyses:
        enqueued |= _enqueued(analysis, events)
    if (rank := slowest(enqueued)) is not None:
        return rank
    world = next((s.world for s in analyses if s.world), None)
    waiting = waiting_ranks(events)
    seen = waiting | {r.rank for a in analyses for r in a.reported}
    if world and len(waiting) == world - 1 and max(seen, default=0) < world:
        return next(iter(set(range(world)) - waiting), None)
    empty = {a.source.rank for a in analyses if not a.lines}
    others = {a.source.rank for a in analyses if a.lines}
    return next(iter(empty)) if len(empty) == 1 and others and others <= waiting else None
