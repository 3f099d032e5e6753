"""Which of all that was found is the cause: the role decides (what broke, before who waited for
it), then time, then rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from training.diagnose import health, progress_marks
from training.diagnose.health import CUT
from training.diagnose.log_analysis import LogAnalysis, SignatureMatch
from training.diagnose.log_line import LogLine
from training.diagnose.signatures import (
    CASCADE,
    EVIDENCE,
    EXIT_STATUS,
    NONE,
    RAISED,
    ROOT,
    UNKNOWN,
    VICTIM,
    WEAK,
    Signature,
)
from training.diagnose.traceback import EXCEPTION, Traceback, place_before

PEER_DIED, NAN = "peer_died", "nan_loss"  # who trains on NaN may well come to the end
WRAPPED = "nccl_init"  # `unhandled system error` around whatever NCCL was told
# a SIGKILL is the kernel's, for memory, only where that is in the logs
KILLED, MEMORY = (
    "killed",
    "host_oom_killed",
)
OUTSIDE = {"interrupted", "preempted"}  # how a run is ended by others
VAGUE = {UNKNOWN, NONE, RAISED, EXIT_STATUS}  # tell nothing beside another cause
OWN = "own"  # our own verdict, or the error file of a rank: nothing is guessed
UNLISTED = "unlisted"  # an exception that the catalogue does not know
LOST = "lost"  # a cascade that tells nothing but that somebody has gone
ABORTED = "aborted"  # how a process ends after that
ORDER = (OWN, ROOT, UNLISTED, WEAK, VICTIM, CASCADE, LOST, ABORTED, CUT)
OF_ITSELF = {OWN, ROOT, WEAK, VICTIM}  # tells something of who says it
CONFIDENCE = (
    dict.fromkeys(ORDER, "low")
    | {OWN: "high", ROOT: "high"}
    | dict.fromkeys((UNLISTED, WEAK, VICTIM), "medium")
)
# How often a count must grow after a failure that it was none. A program that dies of an exception
# may still have a full buffer to print (8 KiB), so that what was merely logged needs less.
GROWN_LOGGED, GROWN_THROWN = 2, 3
BUFFER = 16 << 10
PID = re.compile(r"\bpid[=: ]+(\d+)", re.I)
TABLE = 4  # lines between a rank in torchrun's table and how it ended
SOON = 120  # lines: what a rank says after the root is of it


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


@dataclass
class RootCause:
    cause: str
    rank: int | None = None
    event: Event | None = None
    confidence: str = "high"
    also: list[str] = field(default_factory=list)
    # what looked like a failure, and training went on
    recovered: list[Event] = field(default_factory=list)


def find_root_cause(stories: Sequence[LogAnalysis], own: Sequence[Event] = ()) -> RootCause:
    """`own`: what structured files say."""
    alive: list[Event] = [e for e in own if e.cause not in (UNKNOWN, RAISED)]
    recovered: list[Event] = []
    for story in stories:
        for event in _events(story):
            (recovered if _went_on(story, event) else alive).append(event)
    alive = _without_ends(_without_followers(alive))
    if not alive and own:
        alive = list(own)
    if not alive:
        return _nothing(stories, recovered)
    best = _without_a_word(_in_words(_begin(_first(alive), recovered), alive), alive)
    best = _for_memory(best, alive, stories)
    also = dict.fromkeys(
        e.cause
        for e in sorted(alive, key=lambda e: ORDER.index(e.role))
        if e.cause not in VAGUE | {best.cause}
    )
    return RootCause(
        best.cause, _rank(best, alive, stories), best, CONFIDENCE[best.role], list(also), recovered
    )


def _events(story: LogAnalysis) -> list[Event]:
    events = [
        Event(h.signature.cause, _role(h), h.line, h.rank, h.time, story, h, h.thrown)
        for h in story.hits
        if h.signature.role != EVIDENCE and not (h.thrown and h.thrown.harmless)
    ]
    listed = {id(h.thrown) for h in story.hits if h.thrown and _tells(h)}
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


def _tells(hit: SignatureMatch) -> bool:
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


def _went_on(story: LogAnalysis, event: Event) -> bool:
    """Whether training went on after it in the same log."""
    offset = event.thrown.last if event.thrown else event.line.offset
    if story.ends_well > max(offset, story.failed) and event.cause != NAN:
        return True
    if event.line.offset < story.started:
        return True  # of an earlier start in the same log
    grown = progress_marks.rises_after(story.marks, offset, event.time, event.line.rank)
    if event.thrown is None and not EXCEPTION.match(event.line.text):
        return grown >= GROWN_LOGGED
    if not progress_marks.began_before(
        story.marks, event.line.offset
    ) and progress_marks.may_be_late(story.marks, offset, BUFFER):
        # its launcher would have said that it failed
        return event.line.rank is not None and story.failed < offset
    timed = event.time is not None and any(
        m.time is not None and m.time > event.time for m in story.marks
    )
    return (
        grown >= (GROWN_LOGGED if timed else GROWN_THROWN) and story.failed < story.marks[-1].offset
    )


def _without_a_word(best: Event, events: Sequence[Event]) -> Event:
    """Only the noise after a failure is there, and torchrun says who failed first: what that was,
    is unknown."""
    story = best.story
    first = next((r for r in story.reported if r.root), None) if story else None
    if best.role != LOST or first is None or first.rank in _lonely(events):
        return best
    return Event(
        EXIT_STATUS if (first.status or 0) > 0 else UNKNOWN,
        LOST,
        first.line,
        first.rank,
        best.time,
        story,
    )


def _for_memory(best: Event, events: Sequence[Event], stories: Sequence[LogAnalysis]) -> Event:
    """A kill is the kernel's where a log tells that memory was short."""
    if best.cause != KILLED:
        return best
    short = any(e.cause == MEMORY for e in events) or any(
        h.signature.cause == MEMORY for s in stories for h in s.hits
    )
    return replace(best, cause=MEMORY) if short else best


def _begin(best: Event, overcome: Sequence[Event]) -> Event:
    """The first one of a row: a loss that stays NaN counts on, and is not overcome by that."""
    story = best.story
    if best.cause != NAN or best.thrown or story is None:
        return best
    row = sorted(
        (
            e
            for e in overcome
            if e.story is story and e.cause == NAN and e.line.offset < best.line.offset
        ),
        key=lambda e: -e.line.offset,
    )
    told = {e.line.offset for e in row} | {best.line.offset}
    for event in row:
        if any(
            event.line.offset < m.offset < best.line.offset and m.offset not in told
            for m in story.marks
        ):
            break
        best = event
    return best


def _in_words(best: Event, events: Sequence[Event]) -> Event:
    """Of exceptions that led to each other the one that tells most: `killed by signal` says more
    than the connection that broke."""
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


def _without_followers(events: list[Event]) -> list[Event]:
    """Without exceptions of the user's code that a known cause has led to: in the same chain, or
    soon after it in the same rank."""
    known = [e for e in events if e.role in (ROOT, OWN)]
    listed = [e for e in events if e.hit and _tells(e.hit)]
    kept = []
    for event in events:
        if event.role in (UNLISTED, CUT):
            chain = event.thrown.first() if event.thrown else None
            if any(e.thrown and e.thrown.first() is chain for e in listed):  # a wrapper says less
                continue
            if any(_follows(event, e) for e in known):
                continue
        kept.append(event)
    return kept


def _without_ends(events: list[Event]) -> list[Event]:
    """Without a stop from outside (Ctrl-C, a time limit) where something had failed in the same log
    before it."""
    broke = [
        e
        for e in events
        if e.role in (OWN, ROOT, UNLISTED, WEAK, VICTIM) and e.cause not in OUTSIDE
    ]
    return [
        e
        for e in events
        if e.cause not in OUTSIDE
        or not any(b.story is e.story and b.line.offset < e.line.offset for b in broke)
    ]


def _follows(event: Event, root: Event) -> bool:
    if event.story is not root.story or (
        event.rank is not None and root.rank is not None and event.rank != root.rank
    ):
        return False
    return 0 <= event.line.number - root.line.number <= SOON


def _first(events: Sequence[Event]) -> Event:
    role = min((e.role for e in events), key=ORDER.index)
    same = [e for e in events if e.role == role]
    firsts: dict[int, Event] = {}
    for event in same:
        mine = firsts.setdefault(id(event.story), event)
        if (event.line.offset, -event.length) < (mine.line.offset, -mine.length):
            firsts[id(event.story)] = event
    infinite = float("inf")
    return min(
        firsts.values(),
        key=lambda e: (
            e.time if e.time is not None else infinite,
            e.rank if e.rank is not None else infinite,
        ),
    )


def _rank(best: Event, events: Sequence[Event], stories: Sequence[LogAnalysis]) -> int | None:
    """Who failed first. Of a text without a rank its log's name tells it, then who started it, then
    torchrun's first failure."""
    story = best.story
    near = (
        [r for r in story.reported if abs(r.line.number - best.line.number) <= TABLE]
        if story
        else []
    )
    if (
        near
        and best.role == LOST
        and (roots := [r for r in story.reported if r.root] if story else [])
    ):
        return roots[0].rank
    if near and best.rank is None:
        return min(near, key=lambda r: abs(r.line.number - best.line.number)).rank
    if best.role in (VICTIM, CASCADE, LOST):
        return _missing(best, events, stories)
    if best.rank is not None or story is None:
        return best.rank
    if story.source.rank is not None:
        return story.source.rank
    before = [rank for offset, rank in story.spawned if offset < best.line.offset]
    if (best.thrown and before) or len(story.spawned) == 1:
        return before[-1] if before else story.spawned[0][1]
    # Lines of C++ and of the kernel have no prefix; the exception that follows has.
    broken = [
        e
        for e in events
        if e.rank is not None and e.role in (ROOT, WEAK, UNLISTED) and e.story is story
    ]
    same = [e for e in broken if e.cause == best.cause] or [
        e for e in broken if e.thrown and e.line.offset > best.line.offset
    ]
    if same:
        return min(same, key=lambda e: e.line.offset).rank
    return _of_table(best, story, _lonely(events))


def _of_table(best: Event, story: LogAnalysis, lonely: set[int]) -> int | None:
    """By torchrun's table: the rank whose process the text names; else its first failure, unless
    that is one who only waited."""
    named = {int(pid) for pid in PID.findall(best.line.text)}
    later = [r for r in story.reported if r.line.offset > best.line.offset]
    of_process = [r.rank for r in later if r.pid in named]
    broken = [r.rank for r in later if r.rank not in lonely]
    first = [r.rank for r in later if r.root and r.rank in broken]
    return next(iter([*of_process, *first, *broken]), None)


def _lonely(events: Sequence[Event]) -> set[int]:
    """The ranks that say they waited for others, or lost them."""
    ranks = {
        e.story.source.rank if e.rank is None and e.story else e.rank
        for e in events
        if e.role in (VICTIM, CASCADE, LOST)
    }
    return {rank for rank in ranks if rank is not None}


def _missing(best: Event, events: Sequence[Event], stories: Sequence[LogAnalysis]) -> int | None:
    """Of a group in which all wait: who has asked for the fewest collectives, else the only one
    that says nothing of it."""
    if best.hit and best.hit.groups.get("rank", "").isdigit():
        return int(best.hit.groups["rank"])
    enqueued: dict[int, int] = {}
    for story in stories:
        enqueued |= story.enqueued
    if len(set(enqueued.values())) > 1:
        lowest = min(enqueued.values())
        who = [rank for rank, number in enqueued.items() if number == lowest]
        if len(who) == 1:
            return who[0]
    world = next((s.world for s in stories if s.world), None)
    waiting = _lonely(events)
    if world and len(waiting) == world - 1 and max(waiting, default=0) < world:
        return next(iter(set(range(world)) - waiting), None)
    return None


def _nothing(stories: Sequence[LogAnalysis], recovered: list[Event]) -> RootCause:
    for story in stories:
        last = max((m.offset for m in story.marks), default=-1)
        if story.failed > max(last, story.ends_well):
            if recovered:  # one of them was none after all
                best = _first(recovered)
                return RootCause(best.cause, _rank(best, recovered, stories), best, "low")
            line = next(line for line in story.lines if line.offset == story.failed)
            rank = next((r.rank for r in story.reported if r.root), None)
            return RootCause(UNKNOWN, rank, Event(UNKNOWN, CUT, line, rank, None, story), "low")
    seen = health.summarize(stories)
    if seen.cause == NONE:
        return RootCause(NONE, confidence="high" if seen.sure else "medium", recovered=recovered)
    rank = seen.line.rank if seen.line else None
    return RootCause(
        UNKNOWN,
        rank,
        Event(UNKNOWN, seen.found, seen.line, rank, None, seen.story) if seen.line else None,
        "low",
    )
