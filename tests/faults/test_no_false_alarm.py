"""Slow phases far over the hang floor cause no alarm."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes
from tests.e2e.conftest import Launched
from tests.faults.conftest import FLOOR_S, RUN, Ended
from training.core.rundir import read_json, read_records

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
@pytest.mark.timeout(660)
@pytest.mark.skipif(
    re.search(r"[\s'\"]", str(ROOT)) is not None,
    reason="torch.compile on a CPU does not work in a folder with a space",
)
def test_compilation(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """With an empty cache."""
    flags = {"compile": 1, "hang_timeout": FLOOR_S, "precision": "fp32", "cwd": ROOT}
    steps = {"num_iterations": 2, "activation_checkpointing": 0, "loss_chunks": 1}
    run = launch(*RUN, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, **flags, **steps)
    assert run.wait(600) == 0, run.output[-3000:]
    events = list(read_records(run.run.events))
    assert [e for e in events if e["event"] in ("verdict", "failure")] == []
    assert (read_json(run.run.plan) or {})["compile"]["value"] is True
    begun = next(e["time"] for e in events if e["event"] == "start")
    assert min(r["time"] for r in run.steps.values()) - begun > FLOOR_S, "it takes longer"


@pytest.mark.soak
def test_wandb_that_hangs_costs_the_training_nothing(inject: Inject, token: str) -> None:
    env = {"WANDB_SILENT": "true"}
    ended = inject(
        # reported during the evaluation: no step follows in time
        "wandb_hang; slow@phase=evaluation,seconds=12",
        num_iterations=40,
        eval_every=20,
        use_dummy_wandb=None,
        wandb_mode="offline",
        env=env,
    )
    assert ended.code == 0, ended.run.output[-3000:]
    assert ended.of("verdict") == ended.of("failure") == []
    records = ended.run.steps
    assert (
        len(records) == 40 and max(r["step_ms"] for step, r in records.items() if step > 2) < 3000
    )
    (warning,) = ended.of("warning")
    assert warning["code"] == "warning.tracker_stuck" and "W&B" in warning["text"]
    hung = next(e for e in ended.of("injected") if e["fault"] == "wandb_hang")
    assert warning["time"] - hung["time"] < 10
    assert "W&B did not finish" in ended.run.output
    # From the last step of the training to the end of the run: the limit for the tracker is 10 s.
    assert ended.of("end")[0]["time"] - max(r["time"] for r in records.values()) < 60
    assert not processes(token)
