"""The GPUs in a failure record: lost, exhausted, or perhaps defective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core import cause_ids
from training.diagnose import exception_cause as causes
from training.launcher import seats
from training.launcher.outcome import Outcome

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord, RankErrorRecord


def note(
    record: FailureRecord,
    outcome: Outcome,
    plan: Plan,
    lost: Sequence[int],
    own: RankErrorRecord | None,
    line: str,
) -> None:
    """Add them to the record. `lost`: positions in the plan; `line`: of the log, with the error."""
    rank = record["rank"]
    if lost:
        first = seats.ranks(plan).start
        record["lost_ranks"] = [first + place for place in lost]
    if record["cause"] == cause_ids.CUDA_DEVICE_ASSERT and causes.suspects_gpu(own, line):
        record["suspect_gpu"] = True
    # a watched command and a process of mp.spawn select their GPU themselves
    of_plan = not outcome.watched and "process" not in record
    if record["cause"] == cause_ids.GPU_OOM and rank is not None and of_plan:
        place = seats.place_of_gpu(plan, rank)
        gpu = None if place is None else causes.gpu_of(plan, place, record["summary"])
        if gpu is not None:
            record["gpu"] = gpu
