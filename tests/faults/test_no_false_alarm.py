"""Slow phases far over the hang floor cause no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import processes
from tests.faults.conftest import Ended

Inject = Callable[..., Ended]


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        # One phase of each kind in a run: a slow phase may be slow again.
        pytest.param(
            "phase=importing torch; phase=building the model; epoch=1,phase=creating data iterator",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "step=1; rank=0,step=10,phase=checkpoint", {"save_every": 10}, marks=pytest.mark.soak
        ),
        pytest.param(
            "rank=0,step=1,phase=backward; phase=evaluation",
            {"eval_every": 10},
            marks=pytest.mark.soak,
        ),
        pytest.param("rank=0,phase=evaluation,call=2", {"eval_every": 10}, marks=pytest.mark.soak),
    ],
)
def test_slow_phases(inject: Inject, spec: str, flags: dict[str, object]) -> None:
    slow = [f"slow@{one},seconds=8" for one in spec.split("; ")]
    ended = inject(";".join(slow), num_iterations=20, **flags)
    assert ended.code == 0, ended.run.output[-3000:]
    assert [e["fault"] for e in ended.of("injected")] == ["slow"] * len(slow) and ended.of(
        "verdict"
    ) == ended.of("failure") == []
    assert len(ended.run.losses) == 20


@pytest.mark.soak
def test_a_slow_disk(inject: Inject) -> None:
    ended = inject("slow_disk@seconds=4", num_iterations=20, save_every=10)
    assert ended.code == 0, ended.run.output[-3000:]
    assert (
        ended.injected["fault"] == "slow_disk" and ended.of("verdict") == ended.of("failure") == []
    )
    assert [e["step"] for e in ended.of("checkpoint")] == [10, 20]


@pytest.mark.soak
def test_all_of_it_in_one_run(inject: Inject) -> None:
    slow = [
        "slow@step=1",
        "slow@phase=evaluation",
        "slow@rank=0,step=20,phase=checkpoint",
        "slow_disk@seconds=4",
    ]
    ended = inject(";".join(slow), num_iterations=30, eval_every=10, save_every=10, limit_s=200)
    assert ended.code == 0, ended.run.output[-3000:]
    assert len(ended.of("injected")) == 4 and ended.of("verdict") == ended.of("failure") == []


@pytest.mark.soak
def test_wandb_that_hangs_costs_the_training_nothing(inject: Inject, token: str) -> None:
    env = {"WANDB_SILENT": "true"}
    ended = inject(
        "wandb_hang", num_iterations=40, use_dummy_wandb=None, wandb_mode="offline", env=env
    )
    assert ended.code == 0, ended.run.output[-3000:]
    assert ended.of("verdict") == ended.of("failure") == []
    records = ended.run.steps
    assert (
        len(records) == 40 and max(r["step_ms"] for step, r in records.items() if step > 2) < 3000
    )
    (warning,) = ended.of("warning")
    assert warning["code"] == "warning.tracker_stuck" and "W&B" in warning["text"]
    assert warning["time"] - ended.injected["time"] < 10
    assert "W&B did not finish" in ended.run.output
    # From the last step of the training to the end of the run: the limit for the tracker is 10 s.
    assert ended.of("end")[0]["time"] - max(r["time"] for r in records.values()) < 60
    assert not processes(token)
