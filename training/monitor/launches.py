"""Launches of a run: their events, the pauses between them, and the time without these."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from training.core import jsonl, rundir
from training.core.jsonl import Record, number, text

PAUSE_S = 5.0  # shorter gaps are not pauses
TRAINED, LAUNCHED = "trained", "launched"  # besides the kinds of events
OVER = ("end", "failure", "given_up", "requeue")
AT_WORK = (TRAINED, "eval", "checkpoint")
CONTINUES = (*AT_WORK, "restart")
BEGINS = (LAUNCHED, "resume", "start")
STARTING = (LAUNCHED, "restart", "resume")  # the ranks do not train yet
STARTED = ("start", *AT_WORK, *OVER)
OF_STARTS = (*OVER, *BEGINS, "restart")  # few, and the history of a run depends on each
RECORDED = "recorded"  # field of an event
BLOCK = 1 << 16  # bytes, more than a record
MOST_OTHERS = 5000  # events of all other kinds


@dataclass(frozen=True)
class SetBack:
    """A launch after the clock was set back: from `launched` (unix s) on, records are `by_s` later
    than their time, and follow those before."""

    launched: float
    by_s: float


def in_order(
    events: Iterable[Record], launched: float | None
) -> tuple[list[Record], list[SetBack]]:
    """The events of `read_events` with times that no launch sets back; a changed one keeps its own
    as RECORDED. How long such a launch came after the one before is unknown: at once. `launched`:
    when the last launch was planned."""
    events = list(events)
    firsts = _set_back(events)
    found: list[SetBack] = []
    ordered: list[Record] = []
    latest = ahead = 0.0
    for place, event in enumerate(events):
        at = clock(event)
        if place in firsts:
            # the plan of an earlier launch is not known
            of_plan = place == firsts[-1] and launched is not None and launched <= at
            begun = launched if of_plan and launched is not None else at
            found.append(SetBack(begun, latest - ahead - begun))
            ahead += found[-1].by_s
        latest = max(latest, at + ahead)
        ordered.append({**event, "time": at + ahead, RECORDED: at} if ahead else event)
    return ordered, found


def _set_back(events: list[Record]) -> list[int]:
    """Places of the first event of each launch that is earlier than an event before it."""
    latest, found = 0.0, []
    for place, event in enumerate(events):
        at = clock(event)
        if event["event"] in BEGINS and at < latest - PAUSE_S:
            found.append(place)
            latest = at
        latest = max(latest, at)
    return found


def later(records: Iterable[Record], found: list[SetBack]) -> Iterator[Record]:
    """The records of metrics.jsonl, from last to first, with times as in `in_order`."""
    left, following = list(found), math.inf
    ahead = ahead_s(found)
    for record in records:
        at = clock(record)
        if left and at > following + PAUSE_S and following >= left[-1].launched:
            ahead -= left.pop().by_s
        following = at
        yield {**record, "time": at + ahead} if ahead and at else record


def ahead_s(found: Iterable[SetBack]) -> float:
    """What the times of the last launch lack."""
    return sum(one.by_s for one in found)


def read_events(file: Path) -> tuple[list[Record], Counter[str]]:
    """Events in the order of the file, and the numbers of those left out, by kind: all of
    OF_STARTS, the newest of the other kinds, and the last ones before each of OF_STARTS, since a
    killed start has no end."""
    kept: dict[int, Record] = {}
    others: deque[tuple[int, Record]] = deque(maxlen=MOST_OTHERS)
    seen = Counter[str]()
    before: tuple[int, Record] | None = None
    for place, event in enumerate(rundir.read_records(file)):
        kind = text(event.get("event"))
        if not kind or not clock(event):
            continue
        seen[kind] += 1
        if kind in OF_STARTS:
            kept.update([before] if before else [])
            kept[place], before = event, None
        else:
            before = place, event
            others.append(before)
    kept.update(others)
    events = [event for _, event in sorted(kept.items(), key=itemgetter(0))]
    return events, seen - Counter(event["event"] for event in events)


def pauses(
    events: Iterable[Record],
    trained: Iterable[float],
    launched: float | None,
    begun: float = 0.0,
) -> list[tuple[float, float]]:
    """(from, to), unix s: from an end, or the last sign of a killed start, to the next launch.
    Restarts by the supervisor are not pauses. `trained`: times of steps; `launched`: when the last
    launch was planned; `begun`: start of the run. An earlier moment is of a clock that was set
    back."""
    moments = [(clock(event), str(event["event"])) for event in events]
    moments += [(at, TRAINED) for at in trained]
    moments += [(launched, LAUNCHED)] if launched else []
    moments = sorted(moment for moment in moments if moment[0] >= begun)
    found, starting = [], True
    for (since, before), (until, after) in pairwise(moments):
        # Of any kind may be the last event of a killed start, and the first of the next one.
        starting = before in STARTING or (starting and before not in STARTED)
        begins = after == LAUNCHED or (after in BEGINS and not starting)
        if until - since > PAUSE_S and (begins or (before in OVER and after not in CONTINUES)):
            found.append((since, until))
    return found


def left_over(at: float, pauses: list[tuple[float, float]]) -> float:
    """The time `at` less all pauses before it."""
    return at - sum(min(at, until) - since for since, until in pauses if at > since)


def clock(record: Record) -> float:
    """Time of the record, unix s; 0 if unknown."""
    at = number(record.get("time"))
    return at if at is not None and math.isfinite(at) else 0.0


@dataclass(frozen=True)
class RunClock:
    """Time of a run from its first launch, `begun` (unix s), without pauses. `ahead_s`: see there,
    of the last launch."""

    begun: float
    pauses: list[tuple[float, float]]
    ahead_s: float = 0.0

    def seconds(self, until: float) -> float | None:
        """Until this moment (unix s) of the last launch. None: it is before the start, since the
        clock was set."""
        took = left_over(until + self.ahead_s, self.pauses) - self.begun
        return took if took >= 0 else None


def run_clock(run: rundir.RunDir, plan: Record | None, launched: float) -> RunClock:
    """`launched`: when the last launch, of `plan`, was planned. Never reads the whole
    metrics.jsonl."""
    if not (plan or {}).get("resume"):
        return RunClock(launched, [])
    events, set_back = in_order(read_events(run.events)[0], launched)
    ahead = ahead_s(set_back)
    begun = min([launched + ahead, *map(clock, events[:1])])
    found = pauses(events, last_steps(run.metrics, events), launched + ahead, begun)
    return RunClock(begun, found, ahead)


def last_steps(metrics: Path, events: Iterable[Record]) -> Iterator[float]:
    """Times of the last step before each launch after one without an end, also if the next one
    has discarded that step."""
    for before, event in pairwise(events):
        ahead = clock(event) - event.get(RECORDED, clock(event))
        if event["event"] in BEGINS and before["event"] not in OVER:
            at = _last_before(metrics, clock(event) - ahead)
            if at is not None:
                yield at + ahead


def _last_before(metrics: Path, moment: float) -> float | None:
    """Time of the last record before `moment`, by bisection."""
    try:
        with metrics.open("rb") as file:
            low, high = 0, file.seek(0, os.SEEK_END)
            while high - low > BLOCK:
                middle = (low + high) // 2
                file.seek(middle)
                file.readline()
                at = clock(jsonl.parse(file.readline()) or {})
                low, high = (middle, high) if 0 < at < moment else (low, middle)
            file.seek(low)
            times = [clock(jsonl.parse(line) or {}) for line in file.read(2 * BLOCK).split(b"\n")]
    except OSError:
        return None
    return max((at for at in times if 0 < at < moment), default=None)
