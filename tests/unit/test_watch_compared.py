"""Collectives of several ranks: what counts as a difference."""

from __future__ import annotations

import pytest

from training.watchdog.compared_calls import (
    OWN_SHAPES,
    counts,
    divided,
    mismatch,
    not_completed,
    not_started,
)
from training.watchdog.probes.flight_recorder import SCHEDULED, STARTED, Call


def test_only_pending_collectives_are_compared() -> None:
    ones, twos = (
        Call("0", 1, "all_reduce", "float [1]", open=False),
        Call("0", 1, "all_reduce", "float [2]", open=False),
    )
    assert mismatch({0: [ones], 1: [twos]}) is None, "both have completed it"
    waits = Call("0", 1, "all_reduce", "float [2]", open=True)
    found = mismatch({0: [ones], 1: [waits]})
    assert found and found.number == 1


@pytest.mark.parametrize("operation", sorted(OWN_SHAPES))
def test_different_parts_of_a_collective_are_not_a_mismatch(operation: str) -> None:
    mine, other = Call("0", 1, operation, "float [2, 2]"), Call("0", 1, operation, "")
    assert mismatch({0: [mine], 1: [other]}) is None
    found = mismatch({0: [mine], 1: [other], 2: [Call("0", 1, "barrier", "")]})
    assert found and found.rank == 2


def test_groups_are_distinguished() -> None:
    first, second = Call("1", 1, "barrier", ""), Call("2", 1, "all_reduce", "float [4]")
    assert mismatch({0: [first, second], 1: [second, first]}) is None


def test_the_backends_of_a_group_are_distinguished() -> None:
    """init_process_group("cpu:gloo,cuda:nccl"): a rank that has not called gloo's third one."""
    first = [Call("0", 3, "all_reduce", "float [8]", backend="nccl", open=False)]
    third = Call("0", 3, "all_reduce", "float [3]", backend="gloo")
    calls = {0: [*first, third], 1: first}
    assert mismatch(calls) is None and divided(calls) is None
    assert counts(calls) == {0: 6, 1: 3}
    waits = Call("0", 4, "all_reduce", "float [8]", backend="nccl")
    assert divided({0: [*first, third], 1: [*first, waits]}), "rank 1 waits for its GPU instead"
    assert not divided({0: [*first, third], 1: [*first, waits, third]})


def waiting(group: str, number: int = 1) -> Call:
    return Call(group, number, "all_reduce", "float [2]")


def used(group: str, number: int = 1) -> Call:
    return Call(group, number, "all_reduce", "float [2]", open=False)


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([[waiting("1")], [waiting("2")]], True),
        ([[waiting("1")], [used("1"), waiting("2")]], False),  # rank 0 may still get its result
        ([[waiting("1")], [waiting("1")]], False),
        ([[waiting("1")], [used("2")]], False),  # rank 1 works
        ([[waiting("1")], [waiting("2")], [waiting("3")], [waiting("4")]], True),
        (
            [[waiting("1")], [waiting("1")], [waiting("2")], [waiting("2")]],
            False,
        ),  # without overlap
        # Ranks 0 and 1 have both been in groups 1 and 2 before.
        (
            [
                [used("1"), used("2"), waiting("1", 2)],
                [used("1"), used("2"), waiting("2", 2)],
                [waiting("3")],
                [waiting("3")],
            ],
            True,
        ),
        ([[used("0"), waiting("1", 2)], [used("1"), waiting("0", 2)], [waiting("1", 2)]], True),
    ],
)
def test_ranks_in_different_groups(calls: list[list[Call]], found: bool) -> None:
    different = divided(dict(enumerate(calls)))
    assert (different is not None) == found
    if different:
        assert different.rank is None and set(different.calls) == set(range(len(calls)))
        assert all(call.open for call in different.calls.values())


def test_the_gpu_that_has_not_reached_a_collective() -> None:
    def call(number: int, state: str, group: str = "0", *, is_open: bool = True) -> Call:
        return Call(group, number, "all_reduce", "float [2]", open=is_open, state=state)

    done = call(7, "completed", is_open=False)
    runs, queued, later = call(8, STARTED), call(8, SCHEDULED), call(9, SCHEDULED)
    assert not_started({0: [done, runs, later], 1: [done, queued, later]}) == (1, queued)
    assert not_started({0: [queued], 1: [runs], 2: [runs]}) == (0, queued)
    assert not_started({2: [queued], 5: [runs]}) == (2, queued), "ranks of another machine"
    still = call(7, STARTED)  # its GPU is stuck at the end of it
    assert not_started({0: [done, runs], 1: [still, queued]}) == (1, queued)
    for none in (
        {},
        {0: [queued]},
        {0: [runs], 1: [runs]},
        {0: [queued], 1: [queued]},
        {0: [runs], 1: [queued], 2: [queued]},  # one of the two
        {0: [runs], 1: [done]},  # it has not called it
        {0: [runs], 1: []},
        {0: [runs], 1: [call(8, SCHEDULED, is_open=False)]},  # gloo: never started
        {0: [runs], 1: [call(8, SCHEDULED, "1")]},  # of another group
        {0: [call(8, "completed")], 1: [queued]},
        # each GPU waits in the collective of one group, and has queued the other one's behind it
        {0: [runs, call(3, SCHEDULED, "1")], 1: [call(3, STARTED, "1"), queued]},
    ):
        assert not_started(none) is None, none


def test_the_rank_that_is_still_in_a_collective_of_the_past() -> None:
    past, still, here = used("0", 7), waiting("0", 7), waiting("0", 8)
    assert not_completed({0: [past, here], 1: [still]}) == (1, still)
    assert not_completed({0: [still, here], 1: [past, here], 2: [past, here]}) == (0, still)
    for none in (
        {},
        {0: [still]},
        {0: [past, here], 1: [past, here]},
        {0: [past], 1: [still]},  # rank 0 does not wait
        {0: [past, here], 1: [still], 2: [still]},
        {0: [past, here], 1: [still], 2: [here]},  # of rank 2 it is unknown
        {0: [used("1"), waiting("0")], 1: [waiting("1"), used("0")]},  # both
    ):
        assert not_completed(none) is None, none
