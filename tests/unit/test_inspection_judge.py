"""What rank 0 makes of the ranks' reports of a training that takes long: slow ranks, and one whose
data has ended."""

from __future__ import annotations

from typing import Any

import pytest

from training.inspector.analysis import Judge, due, next_due
from training.inspector.reporting import Finding
from training.inspector.shared_store import OwnStore, SharedStore


class Told:
    """A judge of `world` ranks on a board; `now` is its clock."""

    def __init__(self, world: int = 2) -> None:
        self.board, self.found, self.now = SharedStore(OwnStore(), 0, world), list[Finding](), 100.0
        self.judge = Judge(
            self.board,
            lambda *_, **__: None,
            self.found.append,
            every=100,
            slow=1.3,
            patience_s=60,
            disjoint=True,
        )

    def after(self, seconds: float, *states: dict[str, Any]) -> list[Finding]:
        """What is found when the ranks' states have been looked at so long later."""
        self.now += seconds
        for rank, changes in enumerate(states):
            state = {
                "step": 0,
                "in_step": False,
                "ended": "",
                "broken": False,
                "laps": 0,
                "times": None,
            }
            self.board.put(f"state/{rank}", state | changes)
        self.found.clear()
        self.judge.look(self.now)
        return list(self.found)


def pace(laps: int, *times: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [{"laps": laps, "times": own, "step": laps} for own in times]


def test_which_steps_are_compared() -> None:
    assert [step for step in range(1, 301) if due(step, 100)] == [1, 10, 100, 200, 300]
    step, steps = 0, []
    while (step := next_due(step, 7)) < 30:
        steps.append(step)
    assert steps == [step for step in range(1, 30) if due(step, 7)] == [1, 7, 10, 14, 21, 28]
    assert not due(1, 0)


def test_a_slow_rank_is_told_when_it_stays_slow() -> None:
    told = Told(3)
    slow, quick = (45.0, 33.0, 50.0), (12.0, 2.0, 50.0)
    assert told.after(1, *pace(50, quick, quick, slow)) == []
    assert told.after(1, *pace(50, quick, quick, slow)) == [], "the same window"
    (found,) = told.after(1, *pace(100, quick, quick, slow))
    assert (found.kind, found.rank) == ("straggler", 2)
    assert (
        "rank 2 is slow: 45.0 ms of its own in a step, 33.0 of them until its data is there; the "
        "others 12.0 ms" in found.text
    )


@pytest.mark.parametrize(
    ("why", "first", "second"),
    [
        ("once", (45.0, 30.0, 50.0), (12.0, 2.0, 50.0)),
        ("less than 1.3 times", (15.0, 1.0, 50.0), (15.0, 1.0, 50.0)),
        ("nothing of the step", (17.0, 1.0, 200.0), (17.0, 1.0, 200.0)),
        ("of a millisecond", (1.4, 0.1, 2.0), (1.4, 0.1, 2.0)),
    ],
)
def test_a_rank_that_is_not_slow(
    why: str, first: tuple[float, float, float], second: tuple[float, float, float]
) -> None:
    told = Told()
    other = (1.0, 0.1, first[2]) if first[0] < 2 else (12.0, 1.0, first[2])
    assert (
        told.after(1, *pace(50, other, first))
        + told.after(1, *pace(100, other, second))
        + told.after(1, *pace(150, other, other))
        == []
    )


WAITS = {"step": 48, "in_step": True}
ENDED = {"step": 48, "ended": "its loader ended"}


def test_a_rank_without_data_is_named_while_others_wait() -> None:
    told = Told(3)
    assert told.after(0, WAITS, ENDED, WAITS) == []
    assert told.after(4, WAITS, ENDED, WAITS) == []
    (found,) = told.after(2, WAITS, ENDED, WAITS)
    assert (found.kind, found.rank, found.step) == ("no_data", 1, 48)
    assert (
        found.text
        == "rank 1 has no more data: its loader ended after step 48, and ranks 0, 2 wait for it in "
        "step 49"
    )


def test_who_has_failed_in_its_step_needs_no_proof_of_patience() -> None:
    (found,) = Told().after(0, WAITS | {"broken": True}, ENDED)
    assert found.rank == 1


@pytest.mark.parametrize(
    ("why", "first", "second"),
    [
        ("it has come as far", ENDED | {"step": 49}, WAITS),
        ("it is in the step too", WAITS, WAITS),
        ("it evaluates, for all that is known", {"step": 48}, WAITS),
        ("both have ended", ENDED | {"step": 47}, ENDED),
    ],
)
def test_a_rank_that_nobody_waits_for(
    why: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    told = Told()
    assert told.after(0, first, second) + told.after(100, first, second) == [], why


def test_ranks_that_go_on_wait_for_nobody() -> None:
    """The others' collectives are answered (Join)."""
    told = Told()
    assert [
        f for step in range(48, 80) for f in told.after(3, {"step": step, "in_step": True}, ENDED)
    ] == []


def test_epochs_of_different_length_are_told_at_the_start() -> None:
    told = Told()
    facts = {
        "dataset": 80,
        "sampler": "S",
        "first": [],
        "structure": "",
        "compared": 1,
        "left_out": "",
        "names": [],
        "wrapped": True,
    }
    for rank, batches in enumerate((20, 19)):
        told.board.put(f"start/{rank}", facts | {"batches": batches})
    (found,) = told.after(0)
    assert (found.kind, found.rank) == (
        "uneven",
        1,
    ) and "rank 1 has 19 batches an epoch, others up to 20" in found.text
