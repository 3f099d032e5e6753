"""What the collectives that the ranks of a user script have called add to a finding from their
stacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from training.core.messages import msg
from training.watchdog import compared_calls
from training.watchdog.hang_report import DESYNC, HANG, UNEVEN, HangFinding
from training.watchdog.probes import flight_recorder
from training.watchdog.probes.flight_recorder import Call


def refine(
    found: HangFinding,
    folder: Path,
    numbers: Collection[int],
    *,
    elsewhere: bool,
    trains: Callable[[], bool],
) -> HangFinding:
    """`folder`: of the recorders' sockets; `numbers`: the running ranks of this machine;
    `elsewhere`: other machines have ranks too; `trains`: has the script printed a step, or a
    loss?"""
    calls = {
        rank: called
        for rank in numbers
        if (called := flight_recorder.read(folder, rank)) is not None
    }
    different = compared_calls.mismatch(calls) if found.kind in (HANG, UNEVEN) else None
    complete = len(calls) == len(numbers)
    unknown = found.kind in (HANG, UNEVEN) and found.rank is None
    if different is None and complete and not elsewhere and unknown:
        different = compared_calls.divided(calls)
    if different is None:
        stuck = _stuck(calls, elsewhere) if complete and unknown else None
        if stuck:
            rank, how = stuck
            return replace(found.blaming(rank), kind=HANG, how=how)
        empty = [rank for rank, own in calls.items() if not own] if unknown else []
        # before its first step a script may have called none
        if empty and trains():
            return replace(found, how=compared_calls.noted(found.how, empty))
        return found
    if found.kind == UNEVEN:
        return replace(found, how=f"{found.how}; {different}")
    where, waiting = (found.where, found.waiting) if different.rank == found.rank else (None, {})
    return replace(
        found,
        kind=DESYNC,
        rank=different.rank,
        where=where,
        waiting=waiting,
        how=str(different),
    )


def _stuck(calls: Mapping[int, Sequence[Call]], elsewhere: bool) -> tuple[int, str] | None:
    """The rank that all others wait for, though it waits itself, and what it waits for."""
    if found := compared_calls.not_started(calls):
        rank, call = found
        return rank, msg("watchdog.gpu_stuck", call=call, number=call.number)
    if not elsewhere and (found := compared_calls.not_completed(calls)):
        rank, call = found
        return rank, msg("watchdog.not_completed", call=call, number=call.number)
    return None
