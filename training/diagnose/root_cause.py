"""Choice of the root cause among all events of the last attempt: by role (a failure before a wait
for it), then time, then rank. A lost connection of the program's own is later than an exception
that may have ended it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from training.core import cause_ids
from training.core.cause_ids import EXIT_STATUS, NONE, RAISED, UNKNOWN
from training.diagnose import health
from training.diagnose.consequences import without_consequences
from training.diagnose.events import (
    LOST,
    ORDER,
    OWN,
    UNLISTED,
    Event,
    failure_events,
)
from training.diagnose.guilty_rank import forget_tasks, guilty_rank, waiting_ranks
from training.diagnose.health import CUT
from training.diagnose.log_analysis import LogAnalysis
from training.diagnose.log_times import RECENT_S
from training.diagnose.signatures import ROOT, VICTIM, WEAK
from training.diagnose.survived import earlier_attempts, survived, survived_elsewhere, with_times

VAGUE = {UNKNOWN, NONE, RAISED, EXIT_STATUS}  # not listed beside another cause
CONFIDENCE = (
    dict.fromkeys(ORDER, "low")
    | {OWN: "high", ROOT: "high"}
    | dict.fromkeys((UNLISTED, WEAK, VICTIM), "medium")
)


@dataclass
class RootCause:
    cause: str
    rank: int | None = None
    event: Event | None = None
    confidence: str = "high"
    also: list[str] = field(default_factory=list)
    # apparent failures after which training continued
    recovered: list[Event] = field(default_factory=list)

    @property
    def status(self) -> int | None:
        """Exit status of the rank that failed first, as the launcher in its log reports it."""
        analysis = self.event.analysis if self.event else None
        return next((r.status for r in analysis.reported if r.root), None) if analysis else None


def find_root_cause(analyses: Sequence[LogAnalysis], own: Sequence[Event] = ()) -> RootCause:
    """`own`: events from structured files."""
    over = earlier_attempts([*(a.source.name for a in analyses), *(str(e.file) for e in own)])
    logs = [a for a in analyses if a.source.name in over]
    errors = [e for e in own if str(e.file) in over]
    found = _of_last_attempt(
        [a for a in analyses if a.source.name not in over],
        [e for e in own if str(e.file) not in over],
        [event for analysis in logs for event in failure_events(analysis)],
    )
    silent = found.event is None or found.event.role == health.NO_SIGN
    if over and found.cause == UNKNOWN and silent:
        before = find_root_cause(logs, errors)
        if before.cause not in (UNKNOWN, NONE):
            return replace(before, confidence="low")
    return found


def _of_last_attempt(
    analyses: Sequence[LogAnalysis], own: Sequence[Event], recovered: list[Event]
) -> RootCause:
    """`recovered`: failures of earlier attempts."""
    alive: list[Event] = [e for e in own if e.cause not in (UNKNOWN, RAISED)]
    forget_tasks(analyses)
    timed = with_times(analyses)
    for analysis in analyses:
        for event in failure_events(analysis):
            over = survived(analysis, event) or survived_elsewhere(analysis, event.last, timed)
            (recovered if over else alive).append(event)
    alive = without_consequences(alive)
    if not alive and own:
        alive = list(own)
    if not alive:
        return _nothing(analyses, recovered)
    best = _most_detailed(_first_nan(_first(alive), recovered), alive)
    best = _first_reported(best, alive, analyses)
    best = _for_memory(best, alive, analyses)
    best = _for_driver(best, [*alive, *recovered])
    also = dict.fromkeys(
        e.cause
        for e in sorted(alive, key=lambda e: ORDER.index(e.role))
        if e.cause not in VAGUE | {best.cause}
    )
    return RootCause(
        best.cause,
        guilty_rank(best, alive, analyses),
        best,
        CONFIDENCE[best.role],
        list(also),
        recovered,
    )


def _first_reported(best: Event, events: Sequence[Event], analyses: Sequence[LogAnalysis]) -> Event:
    """If the logs have only consequences of a failure: the first failure that a launcher reports,
    with unknown cause, but of no rank that waited for others."""
    waiting = waiting_ranks(events)
    firsts = [(next((r for r in a.reported if r.root), None), a) for a in analyses]
    known = [(r, a) for r, a in firsts if r and r.rank not in waiting]
    if best.role != LOST or not known:
        return best
    # an abort often follows from the loss of another rank, whose log may be missing
    first, analysis = min(
        known, key=lambda x: ((x[0].status or 0) <= 0, _known(x[1].times.at(x[0].line.offset)))
    )
    cause = EXIT_STATUS if (first.status or 0) > 0 else UNKNOWN
    return Event(cause, LOST, first.line, first.rank, best.time, analysis)


def _for_memory(best: Event, events: Sequence[Event], analyses: Sequence[LogAnalysis]) -> Event:
    """Out of memory instead of a plain SIGKILL, where a log shows a lack of memory."""
    if best.cause != cause_ids.KILLED:
        return best
    short = any(e.cause == cause_ids.HOST_OOM_KILLED for e in events) or any(
        h.signature.cause == cause_ids.HOST_OOM_KILLED for s in analyses for h in s.hits
    )
    return replace(best, cause=cause_ids.HOST_OOM_KILLED) if short else best


def _for_driver(best: Event, events: Sequence[Event]) -> Event:
    """Instead of a missing GPU: torch's earlier warning about the driver, for which it sees
    none."""
    if best.cause != cause_ids.NO_GPU:
        return best
    warned = [e for e in driver_warnings(events) if e.analysis is best.analysis]
    return _first(warned) if warned else best


def driver_warnings(events: Sequence[Event]) -> list[Event]:
    """Warnings of torch that it sees no GPU because of the driver: a script may train on the
    CPU."""
    return [e for e in events if e.cause == cause_ids.CUDA_DRIVER_TOO_OLD and e.role == WEAK]


def _first_nan(best: Event, overcome: Sequence[Event]) -> Event:
    """The first of consecutive NaN losses: steps that continue with NaN are not a recovery."""
    analysis = best.analysis
    if best.cause != cause_ids.NAN_LOSS or best.thrown or analysis is None:
        return best
    row = sorted(
        (
            e
            for e in overcome
            if e.analysis is analysis
            and e.cause == cause_ids.NAN_LOSS
            and e.line.offset < best.line.offset
        ),
        key=lambda e: -e.line.offset,
    )
    known = {e.line.offset for e in row} | {best.line.offset}
    for event in row:
        if any(
            event.line.offset < m.offset < best.line.offset and m.offset not in known
            for m in analysis.marks
        ):
            break
        best = event
    return best


def _most_detailed(best: Event, events: Sequence[Event]) -> Event:
    """The most detailed exception of a chain: `killed by signal` before the broken connection."""
    if best.thrown is None:
        return best
    chain = [
        e
        for e in events
        if e.thrown and e.thrown is not best.thrown and e.thrown.first() is best.thrown.first()
    ]
    return max(
        [best, *(e for e in chain if (e.cause, e.role) == (best.cause, best.role))], key=_facts
    )


def _facts(event: Event) -> int:
    return sum(1 for value in event.hit.groups.values() if value) if event.hit else 0


def _first(events: Sequence[Event]) -> Event:
    role = min((e.role for e in events), key=ORDER.index)
    same = [e for e in events if e.role == role]
    if role == CUT:  # a whole exception contains more than the head of a traceback
        same = [e for e in same if e.cause == RAISED] or same
    firsts: dict[int, Event] = {}
    for event in same:
        first = firsts.setdefault(id(event.analysis), event)
        if (event.line.offset, -event.length) < (first.line.offset, -first.length):
            firsts[id(event.analysis)] = event
    lost = [e for e in firsts.values() if e.severed]
    others = [e for e in firsts.values() if not e.severed]

    def follows(event: Event) -> bool:
        if event.severed:
            return any(_may_sever(other, event) for other in others)
        return any(_ended_by(one, event) and not _before(event, one) for one in lost)

    return min(firsts.values(), key=lambda e: (follows(e), _known(e.time), _known(e.rank)))


def _may_sever(failure: Event, event: Event) -> bool:
    """Whether the connection in the log of another machine may be lost to the process that
    failed: not if that happened later."""
    if _ended_by(event, failure):
        return False
    before = event.analysis.times.from_(event.last) if event.analysis else None
    return failure.time is None or before is None or failure.time <= before + RECENT_S


def _ended_by(event: Event, failure: Event) -> bool:
    """Whether only the launcher of `event` reports a first failure, and its rank: it ended all
    other ranks."""
    return _heads_report(event) and not (failure.analysis and failure.analysis.reported)


def _before(failure: Event, event: Event) -> bool:
    """Whether it certainly happened before the event: by a time of its own, or the first one after
    it."""
    if not failure.analysis or event.time is None:
        return False
    times, thrown = failure.analysis.times, failure.thrown
    own = times.within(thrown.since, failure.last) if thrown else None
    after = times.from_(failure.last) if own is None else own
    return after is not None and after < event.time


def _heads_report(event: Event) -> bool:
    """Whether its launcher reports that this rank was the first to fail."""
    reported = event.analysis.reported if event.analysis else []
    return any(r.root and r.rank == event.rank for r in reported)


def _known(value: float | None) -> float:
    """For an order in which unknown values are last."""
    return float("inf") if value is None else value


def _nothing(analyses: Sequence[LogAnalysis], recovered: list[Event]) -> RootCause:
    timed = with_times(analyses)
    for analysis in analyses:
        last = max((m.offset for m in analysis.marks), default=-1)
        line = analysis.failed_line
        if line is None or survived_elsewhere(analysis, line.offset, timed):
            continue
        if analysis.failed > last:
            if recovered:  # one of them was fatal after all
                best = _first(recovered)
                return RootCause(best.cause, guilty_rank(best, recovered, analyses), best, "low")
            rank = next((r.rank for r in analysis.reported if r.root), None)
            return RootCause(UNKNOWN, rank, Event(UNKNOWN, CUT, line, rank, None, analysis), "low")
    seen, warned = health.summarize(analyses), driver_warnings(recovered)
    if seen.cause == NONE:
        return RootCause(
            NONE,
            confidence="high" if seen.sure else "medium",
            also=[cause_ids.CUDA_DRIVER_TOO_OLD] if warned else [],
            recovered=recovered,
        )
    if warned:
        best = _first(warned)
        return RootCause(best.cause, best.rank, best, "low", recovered=recovered)
    rank = seen.line.rank if seen.line else None
    return RootCause(
        UNKNOWN,
        rank,
        Event(UNKNOWN, seen.found, seen.line, rank, None, seen.analysis) if seen.line else None,
        "low",
    )
