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
OF_STARTS = (*OVER, *BEGINS, "restart")  # few, and the history of a run depends on each
BLOCK = 1 << 16  # bytes, more than a record
MOST_OTHERS = 5000  # events of all other kinds


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
    """(from, to), unix s: from an end, or from the last step of a killed start, to the next launch.
    Restarts by the supervisor are not pauses. `trained`: times of steps; `launched`: when the last
    launch was planned; `begun`: start of the run. An earlier moment is of a clock that was set
    back."""
    moments = [(clock(event), str(event["event"])) for event in events]
    moments += [(at, TRAINED) for at in trained]
    moments += [(launched, LAUNCHED)] if launched else []
    moments = sorted(moment for moment in moments if moment[0] >= begun)
    found = []
    for (since, before), (until, after) in pairwise(moments):
        if until - since > PAUSE_S and (
            (before in OVER and after not in CONTINUES) or (before in AT_WORK and after in BEGINS)
        ):
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
    """Time of a run from its first launch, `begun` (unix s), without pauses."""

    begun: float
    pauses: list[tuple[float, float]]

    def seconds(self, until: float) -> float | None:
        """Until this moment (unix s). None: it is before the start, since the clock was set."""
        took = left_over(until, self.pauses) - self.begun
        return took if took >= 0 else None


def run_clock(run: rundir.RunDir, plan: Record | None, launched: float) -> RunClock:
    """`launched`: when the last launch, of `plan`, was planned. Never reads the whole
    metrics.jsonl."""
    if not (plan or {}).get("resume"):
        return RunClock(launched, [])
    events, _ = read_events(run.events)
    begun = min([launched, *map(clock, events[:1])])
    return RunClock(begun, pauses(events, last_steps(run.metrics, events), launched, begun))


def last_steps(metrics: Path, events: Iterable[Record]) -> Iterator[float]:
    """Times of the last step before each launch after one without an end, also if the next one
    has discarded that step."""
    for before, event in pairwise(events):
        if event["event"] in BEGINS and before["event"] not in OVER:
            at = _last_before(metrics, clock(event))
            if at is not None:
                yield at


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
