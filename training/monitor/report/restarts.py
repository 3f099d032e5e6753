"""The starts of a run: the pauses between them, and what the ranks of one said that nobody
watched."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from training.core import rundir
from training.core.jsonl import Record, number, read_object, text, whole
from training.diagnose import exception_cause
from training.monitor.report.curve import clock

if TYPE_CHECKING:
    from training.core.contracts.verdict import ReportedError

PAUSE_S = 5.0  # what is shorter is time like any other
TRAINED, LAUNCHED = "trained", "launched"  # beside the kinds of events
OVER = ("end", "failure", "given_up", "requeue")
AT_WORK = (TRAINED, "eval", "checkpoint")
GOES_ON = (*AT_WORK, "restart")
BEGINS = (LAUNCHED, "resume", "start")


def pauses(
    events: Iterable[Record], trained: Iterable[float], launched: float | None
) -> list[tuple[float, float]]:
    """(from, to), unix s: after an end (or, of a start that was killed, after its last step)
    nothing happened until the next launch. What a supervisor needs to start again is no pause.
    `trained`: times of steps; `launched`: when the last launch was planned."""
    signs = [(clock(event), str(event["event"])) for event in events]
    signs += [(at, TRAINED) for at in trained]
    signs += [(launched, LAUNCHED)] if launched else []
    signs.sort()
    found = []
    for (since, before), (until, after) in pairwise(signs):
        if until - since > PAUSE_S and (
            (before in OVER and after not in GOES_ON) or (before in AT_WORK and after in BEGINS)
        ):
            found.append((since, until))
    return found


def of_ranks(folder: rundir.RunDir, since: float) -> Record | None:
    """As failure.json would be: the first error that a rank of this start reported, of those that
    only lost another one last."""
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
        "summary": _said(first),
        "phase": text(first.get("phase")),
        "where": text(first.get("where")),
        "time": number(first.get("time")),
        "evidence": [f"rank {e['rank']}: {_said(e)}" for e in others],
        "log": str(folder.rank_log(first["rank"])),
    }


def _is_victim(error: Record) -> bool:
    return exception_cause.is_victim(cast("ReportedError", {"message": "", **error}))


def _said(error: Record) -> str:
    return f"{error['type']}: {' '.join(str(error.get('message', '')).split())}"
