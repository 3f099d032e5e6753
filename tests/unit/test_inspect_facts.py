"""Health checks of data and parameters, from the files of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import Made
from training.monitor.health import run_checks
from training.monitor.health.activity import ActivityWindow
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN, HealthCheck
from training.monitor.health.target import Target
from training.monitor.state import RunWatch

SHARDS = {"world_size": 2, "dataset_sequences": 1000, "batches": 125, "count": 500}


@pytest.fixture
def run(tmp_path: Path) -> Made:
    config = {"num_iterations": 400, "inspect_every": 50}
    return Made(
        tmp_path / "experiments" / "small run", config=config, batch={"device_sequences": 4}
    ).steps(100)


def observed(made: Made) -> tuple[Target, dict[str, Any]]:
    return Target(made.run, made.plan, {}, 2, 2, "plan.json"), RunWatch(made.run).read()


def test_data_of_each_rank(run: Made) -> None:
    target, _ = observed(run)

    def judge(**other: Any) -> HealthCheck:
        ranks = [{"rank": r, "first_sequences": [r, r + 10]} | SHARDS for r in (0, 1)]
        ranks[1] |= other
        return run_checks.data(
            target, [{"event": "shards", "epoch": 3, "proven_sequences": 1000, "ranks": ranks}]
        )

    whole = (
        "epoch 3: 1000 sequences, 500 sequences in 125 batches for each of 2 ranks; disjoint "
        "and complete, verified for 1000 of them"
    )
    assert judge() == HealthCheck("data", OK, whole)
    assert (
        judge(dataset_sequences=999).text
        == "the ranks' datasets differ: rank 0 1000 sequences; rank 1 999 sequences"
    )
    assert judge(world_size=1).text == "the data is divided among 2 ranks, but the plan has 2"
    assert (
        judge(first_sequences=[0, 11]).text
        == "epoch 3: the ranks' shares overlap or differ in size: [500, 500]"
    )
    assert judge(count=400).status == judge(dataset_sequences=1).status == BAD
    assert (
        run_checks.data(target, []).status
        == run_checks.data(target, [{"event": "shards", "ranks": "x"}]).status
        == UNKNOWN
    )


@pytest.mark.parametrize(
    ("every", "begun", "done", "status", "text"),
    [
        (50, 0, 100, OK, "equal on all ranks at step 100, bit for bit; compared every 50 steps"),
        (50, 0, 99, OK, "equal on all ranks at step 50, bit for bit; compared every 50 steps"),
        (1000, 0, 100, OK, "equal on all ranks at step 1, bit for bit; compared every 1000 steps"),
        (50, 60, 99, UNKNOWN, "not compared yet in this start; first comparison at step 100"),
        (50, 0, 0, UNKNOWN, "not compared yet in this start; first comparison at step 1"),
        (0, 0, 100, WARN, "never compared (--inspect_every=0)"),
    ],
)
def test_last_comparison_of_parameters(
    run: Made, every: int, begun: int, done: int, status: str, text: str
) -> None:
    run.plan["config"]["inspect_every"] = every
    target, state = observed(run)
    state["progress"]["step"] = done
    found = run_checks.parameters(
        target, ActivityWindow({}, 1.0), state, [{"event": "start", "step": begun}]
    )
    assert found == HealthCheck("parameters", status, text)


@pytest.mark.parametrize(
    ("loss", "norm", "status"),
    [
        (2.0, 1.0, OK),
        (2.0, math.inf, WARN),  # fp16: the step is skipped
        (2.0, math.nan, WARN),
        (math.nan, math.nan, BAD),
    ],
)
def test_an_infinite_gradient_norm_of_a_script_is_a_warning(
    run: Made, loss: float, norm: float, status: str
) -> None:
    _, state = observed(run)
    state["training"] |= {"loss": loss, "grad_norm": norm}
    state["log"] = {"file": "out.log"}
    checks = run_checks.of_script(state, state)  # type: ignore[arg-type]
    assert (checks[-1].name, checks[-1].status) == ("loss", status)
    of_a_run = run_checks.loss(state)  # type: ignore[arg-type]
    assert of_a_run.status == (OK if status == OK else BAD)


def test_events_of_an_earlier_start_are_ignored(made: Made) -> None:
    made.run.event("start", step=0)
    made.run.event("warning", text="old")
    made.run.event("restart", text="restarted after a kill at step 7")
    made.run.event("start", step=7)
    assert [e["event"] for e in run_checks.events(made.run)] == ["restart", "start"]
