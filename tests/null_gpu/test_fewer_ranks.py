"""GPUs that fall off the bus during a run with --min_ranks, and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launched
from tests.null_gpu.conftest import NullGpus
from training.core.rundir import read_json, read_records

Train = Callable[..., Launched]
LOST = 999  # CUDA's unknown error: the driver does not list the device any more
FLAGS = {
    "device_batch_size": 4,
    "total_batch_size": 1536,
    "save_every": 20,
    "num_iterations": 100_000,
    "log_every": 100,
    "min_ranks": 1,
}


def events(run: Launched, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_records(run.run.events) if r["event"] == kind]


def recovered(run: Launched, times: int) -> None:
    wait_until(
        lambda: len(events(run, "recovered")) == times or run.process.poll() is not None,
        90,
        "the restart",
    )
    assert run.process.poll() is None, run.output[-4000:]


def plan(run: Launched) -> dict[str, Any]:
    return read_json(run.run.plan) or {}


def gpus_of(run: Launched) -> list[int]:
    return [gpu["index"] for gpu in plan(run)["gpus"]]


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        (3, 1),
        *(
            pytest.param(ranks, lost, marks=pytest.mark.soak)
            for ranks, lost in ((2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (4, 3))
        ),
    ],
)
def test_a_lost_gpu_is_left_out_and_used_again(
    train: Train, gpus: NullGpus, ranks: int, lost: int
) -> None:
    run = train(ranks=ranks, **FLAGS)
    wait_until(lambda: events(run, "checkpoint"), 90, "a checkpoint")
    gpus.break_down(lost, LOST)
    recovered(run, 1)
    (restart,) = events(run, "restart")
    assert (restart["cause"], restart["ranks"]) == ("gpu_hardware", [ranks, ranks - 1])
    assert [(one["seat"], one["gpu"]) for one in restart["lost"]] == [(lost, lost)]
    assert gpus_of(run) == [n for n in range(ranks) if n != lost]
    gpus.repair(lost)
    recovered(run, 2)
    _, second = events(run, "restart")
    assert (second["cause"], second["back"]) == ("none", [lost])
    assert second["steps_lost"] == 0, "they have saved before they exited"
    assert gpus_of(run) == list(range(ranks)) and plan(run)["elastic"]["lost"] == []
    # lost again, it is not tested again
    gpus.break_down(lost, LOST)
    recovered(run, 3)
    gpus.repair(lost)
    saved = len(events(run, "checkpoint"))
    wait_until(lambda: len(events(run, "checkpoint")) > saved + 2, 90, "more checkpoints")
    assert len(events(run, "restart")) == 3
    run.process.terminate()
    assert run.wait() == 75
    steps = [r["step"] for r in read_records(run.run.metrics) if "loss" in r]
    assert sorted(set(steps)) == list(range(1, run.summary["steps"] + 1)), "none is left out"
