"""The collectives that the ranks have called, compared: different ones, different groups, a GPU
that has not reached one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from training.core.messages import msg
from training.watchdog.probes.flight_recorder import SCHEDULED, STARTED, Call, CallKey

# Collectives whose inputs or outputs may differ between ranks: only one rank scatters, parts may
# have any size.
OWN_SHAPES = {"scatter", "gather", "all_to_all", "alltoall_base", "all_to_allv"}
DEFAULT_GROUP = "0"  # of all ranks


@dataclass(frozen=True)
class Mismatch:
    """`rank` is the odd one out; None without a majority (two ranks)."""

    rank: int | None
    number: int
    calls: dict[int, Call]

    def __str__(self) -> str:
        calls = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(self.calls.items()))
        return msg("watchdog.calls.differ", number=self.number, calls=calls)


def mismatch(calls: Mapping[int, Sequence[Call]]) -> Mismatch | None:
    """The first collective that all of these ranks have called, that some of them are still in, and
    that differs between them."""
    by_key = {rank: {call.key: call for call in own} for rank, own in calls.items()}
    if len(by_key) < 2:
        return None
    by_all = set.intersection(*(set(own) for own in by_key.values()))
    for group, backend, number in sorted(by_all, key=lambda key: (key[2], key)):
        at = {rank: own[group, backend, number] for rank, own in by_key.items()}
        if not any(call.open for call in at.values()):
            continue
        texts = {
            rank: call.operation if call.operation in OWN_SHAPES else str(call)
            for rank, call in at.items()
        }
        (common, votes), *others = Counter(texts.values()).most_common()
        if others:
            odd = [rank for rank in at if texts[rank] != common]
            return Mismatch(odd[0] if votes > len(at) / 2 and len(odd) == 1 else None, number, at)
    return None


@dataclass(frozen=True)
class Divided(Mismatch):
    """Ranks that wait for each other in different process groups."""

    def __str__(self) -> str:
        calls = "; ".join(
            msg("watchdog.calls.in_group", rank=rank, call=call, group=call.group)
            for rank, call in sorted(self.calls.items())
        )
        return msg("watchdog.calls.divided", calls=calls)


def divided(calls: Mapping[int, Sequence[Call]]) -> Divided | None:
    """`calls`: of all ranks of the job. The ranks of a group are unknown here. Each rank waits in a
    call that no other rank has made: then the missing ones wait elsewhere, which is certain. Or two
    ranks do so that have both used the group of the other one before."""
    made = {rank: {c.key for c in own} for rank, own in calls.items()}
    waits = {rank: [c for c in own if c.open] for rank, own in calls.items()}
    if len(calls) < 2 or not all(waits.values()):
        return None

    def lacks(other: int, rank: int) -> bool:
        return not any(c.key in made[other] for c in waits[rank])

    def belongs(other: int, rank: int) -> bool:
        known = {DEFAULT_GROUP} | {c.group for c in calls[other]}
        return all(c.group in known for c in waits[rank])

    def apart(one: int, other: int) -> bool:
        groups = ({(c.group, c.backend) for c in waits[rank]} for rank in (one, other))
        return set.isdisjoint(*groups) and lacks(one, other) and lacks(other, one)

    pairs = list(itertools.combinations(calls, 2))
    if not all(apart(*pair) for pair in pairs) and not any(
        apart(one, other) and belongs(one, other) and belongs(other, one) for one, other in pairs
    ):
        return None
    return Divided(None, 0, {rank: own[0] for rank, own in waits.items()})


def not_started(calls: Mapping[int, Sequence[Call]]) -> tuple[int, Call] | None:
    """The one rank whose GPU has not reached a collective in which the GPUs of all others wait, and
    that collective. A GPU that waits in a collective for others itself is not stuck."""
    waiting = {
        rank: {c.key for c in own if c.open and c.state == STARTED} for rank, own in calls.items()
    }
    done = _completed(calls)
    for rank, own in calls.items():
        others = [other for other in calls if other != rank]
        if not others:
            return None
        if any(key not in done[other] for key in waiting[rank] for other in others):
            continue
        for call in own:
            late = call.open and call.state == SCHEDULED
            if late and all(call.key in waiting[other] for other in others):
                return rank, call
    return None


def not_completed(calls: Mapping[int, Sequence[Call]]) -> tuple[int, Call] | None:
    """The one rank that is still in a collective which all others have completed, and that
    collective. The others wait in another one."""
    pending = {rank: [c for c in own if c.open] for rank, own in calls.items()}
    done = _completed(calls)
    if len(calls) < 2 or not all(pending.values()):
        return None
    late = [
        (rank, call)
        for rank, own in pending.items()
        for call in own[:1]
        if all(call.key in keys for other, keys in done.items() if other != rank)
    ]
    return late[0] if len(late) == 1 else None


def _completed(calls: Mapping[int, Sequence[Call]]) -> dict[int, set[CallKey]]:
    return {rank: {c.key for c in own if not c.open} for rank, own in calls.items()}


def counts(calls: Mapping[int, Sequence[Call]]) -> dict[int, int]:
    """Number of the last collective of each rank, over all groups, and of each backend, as these
    number their own."""

    def last(own: Sequence[Call], backend: str) -> int:
        return max(call.number for call in own if call.backend == backend)

    return {
        rank: sum(last(own, backend) for backend in {call.backend for call in own})
        for rank, own in calls.items()
    }


def noted(how: str, ranks: Iterable[int]) -> str:
    """`how`, of a hang without a guilty rank, and why there is less evidence: the recorders of
    these ranks are empty, though they have called collectives."""
    return msg("watchdog.calls.none", how=how, ranks=", ".join(f"rank {r}" for r in sorted(ranks)))
