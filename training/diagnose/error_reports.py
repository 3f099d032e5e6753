"""Error reports of the ranks: what a rank reports to Duet, and what `@record` of
torch.distributed.elastic writes where that is missing or no more than an exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import jsonl, run_reader, rundir
from training.diagnose import traceback
from training.diagnose.exception_cause import LEFT

if TYPE_CHECKING:
    from training.core.contracts.verdict import RankErrorRecord


def of_rank(run: rundir.RunDir, rank: int) -> RankErrorRecord | None:
    own = run_reader.read_rank_error(run.rank_error(rank))
    return own if own and own["type"] != LEFT else _recorded(run, rank) or own


def of_all(run: rundir.RunDir) -> list[RankErrorRecord]:
    files = (*run.ranks.glob("rank*.error.json"), *run.ranks.glob("rank*.torchelastic.json"))
    ranks = {int(number) for p in files if (number := p.name[4:].partition(".")[0]).isdecimal()}
    return [error for rank in sorted(ranks) if (error := of_rank(run, rank))]


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
