"""Analysis of reports on rank 0: slow ranks, and a rank that has run out of data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.inspector import step_timer
from training.inspector.analysis import Judge, due, next_due
from training.inspector.reporting import Finding
from training.inspector.shared_store import OwnStore, SharedStore


class Reports:
    """A Judge of `world` ranks on a store; `now` is its clock."""

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
        """The findings `seconds` later, with these states of the ranks."""
        self.now += seconds
        for rank, changes in enumerate(states):
            state = {
                "step": 0,
                "in_step": False,
                "ended": "",
                "broken": False,
                "epoch": 0,
                "waits": False,
                "laps": 0,
                "times": None,
            }
            self.board.put(f"state/{rank}", state | changes)
        self.found.clear()
        self.judge.look(self.now)
        return list(self.found)


def pace(laps: int, *times: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [{"laps": laps, "times": own, "step": laps} for own in times]


def test_steps_that_are_compared() -> None:
    assert [step for step in range(1, 301) if due(step, 100)] == [1, 10, 100, 200, 300]
    step, steps = 0, []
    while (step := next_due(step, 7)) < 30:
        steps.append(step)
    assert steps == [step for step in range(1, 30) if due(step, 7)] == [1, 7, 10, 14, 21, 28]
    assert not due(1, 0)


def test_a_persistently_slow_rank_is_reported() -> None:
    reports = Reports(3)
    slow, quick = (45.0, 33.0, 50.0), (12.0, 2.0, 50.0)
    assert reports.after(1, *pace(50, quick, quick, slow)) == []
    assert reports.after(1, *pace(50, quick, quick, slow)) == [], "the same window"
    (found,) = reports.after(1, *pace(100, quick, quick, slow))
    assert (found.kind, found.rank) == ("straggler", 2)
    assert (
        "rank 2 is slow: 45.0 ms of its own work per step, 33.0 ms of it waiting for data; the "
        "other ranks 12.0 ms" in found.text
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
def test_differences_that_are_not_reported(
    why: str, first: tuple[float, float, float], second: tuple[float, float, float]
) -> None:
    reports = Reports()
    other = (1.0, 0.1, first[2]) if first[0] < 2 else (12.0, 1.0, first[2])
    assert (
        reports.after(1, *pace(50, other, first))
        + reports.after(1, *pace(100, other, second))
        + reports.after(1, *pace(150, other, other))
        == []
    )


class Event:
    """A GPU reaches it at this time, in ms; it has got to `reached`."""

    reached = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "CUDA raises"
        return end.at - self.at


def test_the_times_of_a_gpu_are_not_those_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the result of the step before it begins the next one: for as long as the
    GPU still computes, and waits for other ranks."""
    host, gpu = SimpleNamespace(now=0.0), SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: host.now))
    monkeypatch.setattr(step_timer, "moment", lambda device: Event(gpu.now))
    monkeypatch.setattr(step_timer.torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = step_timer.Clock(torch.device("cuda"))
    for _ in range(step_timer.LEAST + 2):
        gpu.now += 2  # without work, until the host has called it
        clock.forward()
        gpu.now += 7
        clock.gradients()
        gpu.now += 11  # collectives, the optimizer
        clock.step()
        host.now += 0.020
        Event.reached = gpu.now - 1  # some time later than the host
    assert clock.medians() == pytest.approx((9.0, 2.0, 20.0))
    assert clock.count == step_timer.LEAST, "neither the first step, nor the last one yet"


WAITS = {"step": 48, "in_step": True}
ENDED = {"step": 48, "ended": "its loader ended", "waits": True}


def test_a_rank_without_data_is_named_while_others_wait() -> None:
    reports = Reports(3)
    assert reports.after(0, WAITS, ENDED, WAITS) == []
    assert reports.after(4, WAITS, ENDED, WAITS) == []
    (found,) = reports.after(2, WAITS, ENDED, WAITS)
    assert (found.kind, found.rank, found.step) == ("no_data", 1, 48)
    assert (
        found.text
        == "rank 1 ran out of data: its loader ended after step 48, and ranks 0, 2 wait for it in "
        "step 49"
    )


def test_a_rank_that_works_on_after_its_data_ended() -> None:
    reports = Reports()
    ended = ENDED | {"epoch": 1, "waits": False}
    assert reports.after(0, WAITS | {"epoch": 1}, ended) == []
    (found,) = reports.after(6, WAITS | {"epoch": 1}, ended)
    assert (found.kind, found.rank, found.step) == ("no_data", 1, 48)


def test_a_failed_step_is_reported_at_once() -> None:
    (found,) = Reports().after(0, WAITS | {"broken": True}, ENDED)
    assert found.rank == 1


@pytest.mark.parametrize(
    ("why", "first", "second"),
    [
        (
            "it evaluates between two epochs",
            ENDED | {"epoch": 3, "waits": False},
            WAITS | {"epoch": 4},
        ),
        ("it evaluates, or the epoch is unknown", ENDED | {"waits": False}, WAITS),
        ("it has come as far", ENDED | {"step": 49}, WAITS),
        ("it is in the step too", WAITS, WAITS),
        ("it evaluates, for all that is known", {"step": 48}, WAITS),
        ("both have ended", ENDED | {"step": 47}, ENDED),
    ],
)
def test_a_rank_without_waiting_ranks(
    why: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    reports = Reports()
    assert reports.after(0, first, second) + reports.after(100, first, second) == [], why


def test_ranks_that_continue_are_not_waiting() -> None:
    """The collectives of the other ranks are matched (Join)."""
    reports = Reports()
    assert [
        f
        for step in range(48, 80)
        for f in reports.after(3, {"step": step, "in_step": True}, ENDED)
    ] == []


def test_epochs_of_different_length_are_reported_at_the_start() -> None:
    reports = Reports()
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
    for rank, batches in enumerate((20, 1)):
        reports.board.put(f"start/{rank}", facts | {"batches": batches})
    (found,) = reports.after(0)
    assert found.rank == 1 and "only 1 batch an epoch on rank 1, up to 20" in found.text
    reports = Reports()
    for rank, batches in enumerate((20, 19)):
        reports.board.put(f"start/{rank}", facts | {"batches": batches})
    (found,) = reports.after(0)
    assert (found.kind, found.rank) == (
        "uneven",
        1,
    ) and "only 19 batches an epoch on rank 1, up to 20 on the others" in found.text
