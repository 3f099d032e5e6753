"""Failure of a start without a supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from training.core import rundir
from training.core.jsonl import Record, number, read_object, text, whole
from training.diagnose import error_reports, exception_cause
from training.monitor.launches import clock

if TYPE_CHECKING:
    from training.core.contracts.verdict import RankErrorRecord, ReportedError


def of_ranks(folder: rundir.RunDir, since: float) -> Record | None:
    """Failure record from the errors that the ranks of this start reported: the first root cause,
    with errors that only result from a lost peer last."""
    try:
        files = sorted(folder.ranks.glob("rank*.error.json"))
    except OSError:
        return None
    errors = [
        _original(e)
        for e in map(read_object, files)
        if e and clock(e) >= since and text(e.get("type")) and whole(e.get("rank")) is not None
    ]
    if not errors:
        return None
    errors.sort(key=lambda e: (_is_victim(e), clock(e)))
    first, *others = errors
    return {
        "cause": exception_cause.of_error(cast("ReportedError", first)),
        "rank": whole(first.get("guilty_rank", first["rank"])),
        "summary": _message(first),
        "phase": text(first.get("phase")),
        "where": text(first.get("where")),
        "time": number(first.get("time")),
        "evidence": [f"rank {e['rank']}: {_message(e)}" for e in others],
        "log": str(folder.rank_log(first["rank"])),
    }


def _original(error: Record) -> Record:
    checked = {**error, "message": str(error.get("message", ""))}
    return cast("Record", error_reports.original(cast("RankErrorRecord", checked)))


def _is_victim(error: Record) -> bool:
    return exception_cause.is_victim(cast("ReportedError", error))


def _message(error: Record) -> str:
    message = " ".join(error["message"].split())
    return error_reports.named(cast("RankErrorRecord", error), message)
