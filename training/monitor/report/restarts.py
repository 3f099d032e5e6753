"""Starts of a run: their events, pauses between them, the failure of a start without a
supervisor."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import rundir
from training.core.jsonl import Record, number, read_object, text, whole
from training.diagnose import exception_cause
from training.monitor.report.curve import clock

if TYPE_CHECKING:
    from training.core.contracts.verdict import ReportedError

PAUSE_S = 5.0  # shorter gaps are not pauses
TRAINED, LAUNCHED = "trained", "launched"  # besides the kinds of events
OVER = ("end", "failure", "given_up", "requeue")
AT_WORK = (TRAINED, "eval", "checkpoint")
CONTINUES = (*AT_WORK, "restart")
BEGINS = (LAUNCHED, "resume", "start")
OF_STARTS = (*OVER, *BEGINS, "restart")  # few, and the history of a run depends on each
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


def of_ranks(folder: rundir.RunDir, since: float) -> Record | None:
    """Failure record from the errors that the ranks of this start reported: the first root cause,
    with errors that only result from a lost peer last."""
    try:
        files = sorted(folder.ranks.glob("rank*.error.json"))
    except OSError:
        return None
    errors = [
        e
        for e in map(read_object, files)
        if e and clock(e) >= since and text(e.get("type")) and whole(e.get("rank")) is not None
    ]
    if not errors:
        return None
    errors.sort(key=lambda e: (_is_victim(e), clock(e)))
    first, *others = errors
    return {
        "cause": exception_cause.of_error(cast("ReportedError", {"message": "", **first})),
        "rank": whole(first.get("guilty_rank", first["rank"])),
        "summary": _message(first),
        "phase": text(first.get("phase")),
        "where": text(first.get("where")),
        "time": number(first.get("time")),
        "evidence": [f"rank {e['rank']}: {_message(e)}" for e in others],
        "log": str(folder.rank_log(first["rank"])),
    }


def _is_victim(error: Record) -> bool:
    return exception_cause.is_victim(cast("ReportedError", {"message": "", **error}))


def _message(error: Record) -> str:
    return f"{error['type']}: {' '.join(str(error.get('message', '')).split())}"
