"""The GPUs in a failure record: lost, exhausted, or perhaps defective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core import cause_ids
from training.core.errors import Exit
from training.diagnose import exception_cause as causes
from training.host.placement import RANK
from training.launcher import seats
from training.launcher.outcome import Outcome
from training.launcher.stop_report import stopped_early

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
    if lost and (first := _first_rank(plan, rank)) is not None:
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


def lost(outcome: Outcome, plan: Plan, own: RankErrorRecord | None) -> tuple[str, tuple[int, ...]]:
    """Message and positions of GPUs that the driver no longer lists. It is not asked about ends
    that have another explanation."""
    status = outcome.guilty[1] if outcome.guilty else 0
    explained = outcome.killed or stopped_early(outcome) or outcome.torn_down
    rejected = outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES)
    if explained or rejected or (outcome.elsewhere and outcome.here is None):
        return "", ()
    hurry = in_a_hurry(outcome, plan, own)
    return causes.lost_gpus(plan, causes.DRIVER_S if hurry else causes.PATIENT_S)


def with_lost(
    outcome: Outcome,
    plan: Plan,
    errors: Sequence[RankErrorRecord],
    places: Sequence[int],
    rank: int | None,
    own: RankErrorRecord | None,
) -> tuple[int, RankErrorRecord | None] | None:
    """(rank of the only lost GPU, its report), if another one has failed first, such as its NVLink
    peer."""
    full = own is not None and own["disk_full"]
    if len(places) != 1 or full or outcome.watched or (own and "process" in own):
        return None
    first = _first_rank(plan, rank)
    if first is None:
        return None
    gone = first + places[0]
    reports = () if outcome.finding else errors
    return None if gone == rank else (gone, next((e for e in reports if e["rank"] == gone), None))


def _first_rank(plan: Plan, rank: int | None) -> int | None:
    """The rank of the first planned GPU; None where it is unknown. `rank` of another launcher has
    the plan of rank 0 with the GPUs that it sees itself: its own, or all of its machine."""
    here = seats.ranks(plan)
    if rank is None or plan["place"]["kind"] != RANK:
        return here.start
    if len(plan["gpus"]) == 1:
        return rank
    return here.start if rank in here else None


def in_a_hurry(outcome: Outcome, plan: Plan, own: RankErrorRecord | None) -> bool:
    """A slow driver delays neither the card of a clear failure nor answers to other machines."""
    clear = own is not None and causes.of_error(own) not in causes.VAGUE
    return clear or outcome.finding is not None or plan["place"]["nnodes"] > 1
