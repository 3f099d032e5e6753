"""Everything in logs and error files that may be the cause of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.diagnose.health import CUT
from training.diagnose.log_analysis import LogAnalysis, SignatureMatch
from training.diagnose.log_line import LogLine
from training.diagnose.signatures import (
    CASCADE,
    EVIDENCE,
    RAISED,
    ROOT,
    UNKNOWN,
    VICTIM,
    WEAK,
    Signature,
)
from training.diagnose.traceback import Traceback, place_before

PEER_DIED = "peer_died"
WRAPPED = "nccl_init"  # `unhandled system error` around whatever NCCL was told
OWN = "own"  # our own verdict, or the error file of a rank: nothing is guessed
UNLISTED = "unlisted"  # an exception that the catalogue does not know
LOST = "lost"  # a cascade that tells nothing but that somebody has gone
ABORTED = "aborted"  # how a process ends after that
ORDER = (OWN, ROOT, UNLISTED, WEAK, VICTIM, CASCADE, LOST, ABORTED, CUT)
OF_ITSELF = {OWN, ROOT, WEAK, VICTIM}  # tells something of who says it


@dataclass
class Event:
    """Something that may be the cause."""

    cause: str
    role: str
    line: LogLine
    rank: int | None
    time: float | None
    story: LogAnalysis | None = None
    hit: SignatureMatch | None = None
    thrown: Traceback | None = None
    text: str = ""
    file: Path | None = None  # where there is no story
    place: str | None = None  # file:line, where no traceback tells it

    @property
    def signature(self) -> Signature | None:
        return self.hit.signature if self.hit else None

    @property
    def length(self) -> int:
        """Of the text that was recognised: of two on one line the longer one says more."""
        return self.hit.length if self.hit else 0

    @property
    def where(self) -> str | None:
        if self.thrown:
            return self.thrown.where
        return self.place or (self.hit.groups.get("where") if self.hit else None)


def failure_events(story: LogAnalysis) -> list[Event]:
    events = [
        Event(h.signature.cause, _role(h), h.line, h.rank, h.time, story, h, h.thrown)
        for h in story.hits
        if h.signature.role != EVIDENCE and not (h.thrown and h.thrown.harmless)
    ]
    listed = {id(h.thrown) for h in story.hits if h.thrown and names_exception(h)}
    for one in story.tracebacks:
        if one.harmless or one.in_thread or one.carries or id(one) in listed:
            continue
        line = one.end or one.start
        cause, role = (RAISED, UNLISTED) if one.end else (UNKNOWN, CUT)
        events.append(
            Event(cause, role, line, one.rank, story.time_at(line.offset), story, None, one)
        )
    events += [
        Event(
            RAISED,
            CUT,
            line,
            line.rank,
            story.time_at(line.offset),
            story,
            place=place_before(story.lines, line),
        )
        for line in story.last_words
    ]
    events = _of_each_line(events)
    if story.cards:
        line, cause, rank, text = story.cards[-1]
        events.append(Event(cause, OWN, line, rank, story.time_at(line.offset), story, text=text))
    return events


def names_exception(hit: SignatureMatch) -> bool:
    """Whether it is what an exception says: its own line, or one of its message that is more than
    the noise after it."""
    thrown = hit.thrown
    own = (
        thrown is not None
        and not thrown.carries
        and thrown.end is not None
        and thrown.end.offset == hit.line.offset
    )
    return own or hit.signature.role in (ROOT, WEAK, VICTIM)


def _of_each_line(events: list[Event]) -> list[Event]:
    """Of what is recognised in one line only the best: `CUDA error: out of memory` is no CUDA error
    of another kind."""
    best: dict[int, Event] = {}
    for event in events:
        other = best.setdefault(event.line.offset, event)
        if (ORDER.index(event.role), -event.length) < (ORDER.index(other.role), -other.length):
            best[event.line.offset] = event
    return list(best.values())


def _role(hit: SignatureMatch) -> str:
    if hit.signature.role != CASCADE:
        return hit.signature.role
    return {UNKNOWN: ABORTED, PEER_DIED: LOST, WRAPPED: LOST}.get(hit.signature.cause, CASCADE)
