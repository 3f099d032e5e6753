"""Candidates for the cause of a failure, from logs and error files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.core import cause_ids
from training.core.cause_ids import RAISED, UNKNOWN
from training.diagnose import connections
from training.diagnose.health import CUT
from training.diagnose.log_analysis import MESSAGE_LINES, LogAnalysis, SignatureMatch
from training.diagnose.log_line import LogLine
from training.diagnose.signatures import CASCADE, EVIDENCE, ROOT, VICTIM, WEAK, Signature
from training.diagnose.traceback import Traceback, place_before

OWN = "own"  # Duet's verdict, or the error file of a rank: nothing is inferred
UNLISTED = "unlisted"  # an exception that is not in the catalogue
LOST = "lost"  # a cascade that shows only the loss of another process
ABORTED = "aborted"  # the end of a process after such a loss
ORDER = (OWN, ROOT, UNLISTED, WEAK, VICTIM, CASCADE, LOST, ABORTED, CUT)
ABOUT_ITSELF = {OWN, ROOT, WEAK, VICTIM}  # about the rank that logged it


@dataclass
class Event:
    """A candidate for the cause."""

    cause: str
    role: str
    line: LogLine
    rank: int | None
    time: float | None
    analysis: LogAnalysis | None = None
    hit: SignatureMatch | None = None
    thrown: Traceback | None = None
    text: str = ""
    file: Path | None = None  # without a `analysis`
    place: str | None = None  # file:line, without a traceback
    # of a connection of the program's own, which may be lost together with a rank
    severed: bool = False

    @property
    def signature(self) -> Signature | None:
        return self.hit.signature if self.hit else None

    @property
    def length(self) -> int:
        """Fixed characters of the match; the longer of two matches in a line is more specific."""
        return self.hit.length if self.hit else 0

    @property
    def last(self) -> int:
        """Offset of its last line."""
        return self.thrown.last if self.thrown else self.line.offset

    @property
    def where(self) -> str | None:
        if self.thrown:
            return self.thrown.where
        return self.place or (self.hit.groups.get("where") if self.hit else None)


def failure_events(analysis: LogAnalysis) -> list[Event]:
    severed = _of_own_connections(analysis)
    hits = [hit for hit in analysis.hits if not (_is_loss(hit) and id(hit.thrown) in severed)]
    events = [
        Event(h.signature.cause, _role(h), h.line, h.rank, h.time, analysis, h, h.thrown)
        for h in hits
        if h.signature.role != EVIDENCE and not (h.thrown and h.thrown.harmless)
    ]
    listed = {id(h.thrown) for h in hits if h.thrown and names_exception(h)}
    for one in analysis.tracebacks:
        if one.harmless or one.in_thread or one.carries or id(one) in listed:
            continue
        line = one.end or one.start
        cause, role = (RAISED, UNLISTED) if one.end else (UNKNOWN, CUT)
        time, own = analysis.times.at(line.offset, one.since), id(one) in severed
        events.append(Event(cause, role, line, one.rank, time, analysis, None, one, severed=own))
    events += [
        Event(
            RAISED,
            CUT,
            line,
            line.rank,
            analysis.times.at(line.offset),
            analysis,
            place=place_before(analysis.lines, line),
        )
        for line in analysis.bare_exceptions
    ]
    events = _of_each_line(events)
    events += _of_natives(analysis, events)
    if analysis.cards:
        line, cause, rank, text = analysis.cards[-1]
        events.append(
            Event(cause, OWN, line, rank, analysis.times.at(line.offset), analysis, text=text)
        )
    return events


def _is_loss(hit: SignatureMatch) -> bool:
    return hit.signature.cause == cause_ids.PEER_DIED


def _of_own_connections(analysis: LogAnalysis) -> set[int]:
    """Tracebacks that show the loss of another process where the program has lost a connection of
    its own, as the frames of their whole chains show."""
    lost = [hit.thrown for hit in analysis.hits if hit.thrown and _is_loss(hit)]
    chains: dict[int, list[str]] = {}
    for one in analysis.tracebacks if lost else ():
        chains.setdefault(id(one.first()), []).extend(one.frames)
    return {
        id(one)
        for one in lost
        if one.frames
        and connections.is_own(one.type, chains[id(one.first())], connections.PROCESSES)
    }


def _of_natives(analysis: LogAnalysis, events: Sequence[Event]) -> list[Event]:
    """C++ exceptions that nothing else explains: no failure comes before one, and no known text is
    in its message."""
    found: list[Event] = []
    for one in analysis.natives:
        end = one.end
        if end is None or any(
            e.role != ABORTED
            and (
                e.line.offset <= end.offset
                or (e.line.rank == end.rank and e.line.number - end.number <= MESSAGE_LINES)
            )
            for e in (*events, *found)
        ):
            continue
        time = analysis.times.at(end.offset)
        found.append(Event(RAISED, UNLISTED, end, end.rank, time, analysis, None, one))
    return found


def names_exception(hit: SignatureMatch) -> bool:
    """Whether the match is the exception's own line, or a significant line of its message."""
    thrown = hit.thrown
    own = (
        thrown is not None
        and not thrown.carries
        and thrown.end is not None
        and thrown.end.offset == hit.line.offset
    )
    return own or hit.signature.role in (ROOT, WEAK, VICTIM)


def _of_each_line(events: list[Event]) -> list[Event]:
    """Only the best event of each line: `CUDA error: out of memory` also matches the generic CUDA
    error."""
    best: dict[int, Event] = {}
    for event in events:
        other = best.setdefault(event.line.offset, event)
        if (ORDER.index(event.role), -event.length) < (ORDER.index(other.role), -other.length):
            best[event.line.offset] = event
    return list(best.values())


def _role(hit: SignatureMatch) -> str:
    if hit.signature.role != CASCADE:
        return hit.signature.role
    # NCCL reports any error that it got as `unhandled system error`
    kinds = {UNKNOWN: ABORTED, cause_ids.PEER_DIED: LOST, cause_ids.NCCL_INIT: LOST}
    return kinds.get(hit.signature.cause, CASCADE)
