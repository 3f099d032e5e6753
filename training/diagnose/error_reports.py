"""Error reports of the ranks: what a rank reports to Duet, and what `@record` of
torch.distributed.elastic writes where that is missing or no more than an exit status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from training.core import jsonl, run_reader, rundir
from training.core.errors import DISK_FULL, RunStopped, UserError
from training.core.matching import matching
from training.core.plain_text import shortened
from training.diagnose import traceback
from training.diagnose.exception_cause import EXITED, LEFT

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord, RankErrorRecord

SPAWNED_END = re.compile(
    r"process (?P<process>\d+) terminated with (?:exit code (?P<status>\d+)|signal )"
)
NONE: Mapping[int, str] = MappingProxyType({})


def of_rank(run: rundir.RunDir, rank: int) -> RankErrorRecord | None:
    own = run_reader.read_rank_error(run.rank_error(rank))
    found = own if own and own["type"] != LEFT else _recorded(run, rank) or own
    return original(found) if found else None


def original(error: RankErrorRecord) -> RankErrorRecord:
    """The error of a data-loader worker or of a process of mp.spawn, or the end of such a process,
    instead of the error with which torch reports it in the rank (torch/_utils.py,
    ExceptionWrapper; torch/multiprocessing/spawn.py)."""
    if error["type"] == EXITED and (end := SPAWNED_END.match(error["message"])):
        own: dict[str, object] = {"process": int(end["process"]), "where": "", "code": None}
        if end["status"]:
            own |= {"type": LEFT, "message": end["status"]}
        return {**error, **own}  # type: ignore[typeddict-item]
    found = traceback.carried(error["message"])
    if found is None:
        return error
    known: dict[str, object] = {"type": found.type, "message": found.text}
    # A damaged file has no line of code on purpose; then that of a worker counts neither.
    if found.where and (error.get("where") or not error.get("traceback")):
        known |= {"where": found.where, "code": found.code}
    if found.process is not None:
        known["process"] = found.process
    return {**error, **known}  # type: ignore[typeddict-item]


def of_all(run: rundir.RunDir, printed: Mapping[int, str] = NONE) -> list[RankErrorRecord]:
    """`printed`: rank → `TYPE: MESSAGE at FILE:LINE` of ranks that could not write their file."""
    names = [p.name for p in matching(run.ranks, "rank*.json")]
    reports = (n for n in names if n.endswith((".error.json", ".torchelastic.json")))
    ranks = {int(number) for n in reports if (number := n[4:].partition(".")[0]).isdecimal()}
    written = [error for rank in sorted(ranks) if (error := of_rank(run, rank))]
    known = {error["rank"] for error in written}
    return written + [_printed(rank, text) for rank, text in printed.items() if rank not in known]


def named(error: RankErrorRecord, message: str) -> str:
    """`TYPE: MESSAGE`; instead of an empty message the line of code, unless that line only names
    the exception too."""
    code = str(error.get("code") or "")
    text = message or ("" if code.startswith("raise ") else code)
    return f"{error['type']}: {text}" if text else error["type"]


def headline(error: RankErrorRecord, most: int) -> str:
    """An exception in one line, with at most this many characters of its message."""
    first = next((line for line in error["message"].splitlines() if line.strip()), "")
    return named(error, shortened(first, most))


def note_others(
    record: FailureRecord, own: RankErrorRecord | None, errors: Sequence[RankErrorRecord]
) -> None:
    """Note the problems of a rank that has rejected its input, and the ranks that have reported the
    same error at the same line as the failed rank."""
    for one in errors:
        if "rejected" in one:
            record["rejected"] = one["rejected"]
    if own is None or own["rank"] != record["rank"]:
        return
    raised = (e for e in errors if e["guilty_rank"] == e["rank"])  # the others only noticed it
    same = sorted(e["rank"] for e in raised if _what(e) == _what(own))
    if len(same) > 1:
        record["ranks"] = same


def _what(error: RankErrorRecord) -> tuple[object, ...]:
    """What has happened, and where: one sys.exit(1) may follow from different exceptions."""
    return error["type"], error["message"], error["where"], error.get("before")


def _printed(rank: int, text: str) -> RankErrorRecord:
    rejects = text.startswith(f"{UserError.__name__}:")  # without a place
    said, at, where = ("", "", "") if rejects else text.rpartition(" at ")
    kind, _, message = (said if at else text).partition(":")  # no space after it: no message
    message = message.lstrip()
    report: RankErrorRecord = {
        "rank": rank,
        "guilty_rank": rank,
        "time": 0.0,  # unknown
        "type": kind,
        "message": message,
        "where": where if at else "",
        "code": None,
        "phase": None,
        "disk_full": any(f"[Errno {number}]" in message for number in DISK_FULL),
        "traceback": [],
    }
    if kind == RunStopped.__name__:
        report["stopped"] = message
    if rejects:
        report["rejected"] = [{"code": "", "text": message}]
    return report


def _recorded(run: rundir.RunDir, rank: int) -> RankErrorRecord | None:
    """Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py of torch 2.13."""
    found = rundir.read_json(run.elastic_error(rank))
    said = jsonl.text(jsonl.dig(found, "message", "message")) or ""
    stack = jsonl.text(jsonl.dig(found, "message", "extraInfo", "py_callstack")) or ""
    kind, colon, message = said.partition(": ")
    if not colon or not kind.isidentifier() or kind == LEFT:
        return None
    return {
        "rank": rank,
        "guilty_rank": rank,
        "time": run.elastic_error(rank).stat().st_mtime,
        "type": kind,
        "message": message,
        "where": traceback.innermost(traceback.frames_of(stack)) or "",
        "code": None,
        "phase": None,
        "disk_full": False,
        "traceback": stack.splitlines(keepends=True),
    }
