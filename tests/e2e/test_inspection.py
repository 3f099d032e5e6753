"""The inspector in real loops on two CPU ranks: hand-written, Lightning, Hugging Face Trainer; with
injected faults and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import PEERS, SCRIPTS, Launched
from training.core.rundir import read_records

Inspect = Callable[..., Launched]
KINDS = ("loop", "lightning", "transformers")


def kinds(*in_ci: str) -> pytest.MarkDecorator:
    """Kinds marked `slow` run for every change; all of them in `make soak`."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(k, marks=pytest.mark.slow if k in in_ci else pytest.mark.soak)
            for k in KINDS
        ],
    )


@pytest.fixture
def inspect(script: Inspect) -> Inspect:
    """inspect(kind, fault, …, mode=…, steps=…, ranks=…): an ended run of
    tests/e2e/scripts/inspected_<kind>.py."""

    def start(
        kind: str, *faults: str, mode: str = "auto", steps: int = 60, ranks: int = 2
    ) -> Launched:
        if kind != "loop" and not PEERS.is_dir():
            pytest.skip("lightning and transformers are not there: make peers")
        env = {"PYTHONPATH": str(PEERS), "HF_HUB_OFFLINE": "1"}
        run = script(
            SCRIPTS / f"inspected_{kind}.py",
            ";".join(faults),
            mode,
            str(steps),
            ranks=ranks,
            env=env,
        )
        run.wait()
        return run

    return start


def warnings(run: Launched) -> dict[str, dict[str, Any]]:
    """kind → event; asserts that the console shows each one too."""
    events = [
        e
        for e in read_records(run.run.events)
        if e["event"] == "warning" and e.get("by") == "inspector"
    ]
    for event in events:
        assert f"[inspector] WARNING: {event['text']}" in run.output
    return {event["kind"]: event for event in events}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        pytest.param("loop", "shuffle;evaluate", marks=pytest.mark.slow),
        pytest.param("loop", "fsdp;stream", marks=pytest.mark.soak),
        pytest.param("lightning", "shuffle", marks=pytest.mark.soak),
        pytest.param("transformers", "accumulate", marks=pytest.mark.soak),
    ],
)
def test_a_correct_loop_has_no_findings(inspect: Inspect, kind: str, extra: str) -> None:
    run = inspect(kind, extra, mode="raise", steps=110).ok()
    assert warnings(run) == {}, run.output
    for rank in range(2):
        assert f"[inspector] rank {rank} of 2: " in run.output
    assert "the ranks' samples are disjoint (first 32 of each rank compared)" in run.output
    told = {
        e["step"]: e
        for e in read_records(run.run.events)
        if e["event"] == "inspection" and "step" in e
    }
    assert set(told) >= {1, 10, 20, 40, 60, 80, 100}
    for event in told.values():
        assert [row["size"] for row in event["ranks"]] == [4, 4]
        assert "all ranks train: rank 0: 4 samples, loss " in event["text"]
        assert ("parameters equal" in event["text"]) == ("fsdp" not in extra)
    assert ("no parameters are compared: 4 sharded" in run.output) == ("fsdp" in extra)


@kinds("lightning")
def test_findings_are_reported_and_training_continues(inspect: Inspect, kind: str) -> None:
    run = inspect(kind, "no sampler", "changed", "slow", "empty", mode="warn", steps=130).ok()
    found = warnings(run)
    assert set(found) == {"overlap", "parameters_differ", "straggler"} | (
        {"empty_batch"} if kind == "loop" else set()
    )
    assert "ranks 0, 1 train on the same samples" in found["overlap"]["text"]
    assert found["straggler"]["rank"] == 1 and "rank 1 is slow" in found["straggler"]["text"]
    parameter = "2.bias" if kind == "loop" else "last.weight"
    assert (
        found["parameters_differ"]["text"]
        == f"parameters differ at step 20: ranks 0, 1 among each other; 1 of 4, first {parameter}"
    )
    assert all(f"rank {rank} done" in run.run.rank_log(rank).read_text() for rank in range(2))


@kinds("transformers")
def test_a_nan_loss_stops_the_run_and_names_rank_and_sample(inspect: Inspect, kind: str) -> None:
    run = inspect(kind, "nan", *["accumulate"] * (kind == "transformers"))
    assert run.wait() == 4
    rank = 1 if kind != "transformers" else run.failure["rank"]  # its order is shuffled
    assert run.failure["rank"] == rank
    assert f"InspectionError: loss is nan on rank {rank} at step " in run.failure["summary"]
    assert "input is not finite: sample 13;" in run.failure["summary"]
    assert warnings_of_all(run)["not_finite"]["rank"] == rank


def warnings_of_all(run: Launched) -> dict[str, dict[str, Any]]:
    """As above; the first rank may exit before it prints another rank's finding."""
    return {
        e["kind"]: e
        for e in read_records(run.run.events)
        if e["event"] == "warning" and e.get("by") == "inspector"
    }


@pytest.mark.soak
def test_a_rank_without_data_is_named_and_no_rank_waits_forever(inspect: Inspect) -> None:
    """The other rank does other long work; it has not exited."""
    run = inspect("loop", "uneven")
    assert run.wait() == 4 and run.failure["rank"] == 1
    text = (
        "rank 1 ran out of data: its loader ended after step 10, and rank 0 waits for it in step 11"
    )
    assert text in run.failure["summary"]
    found = warnings(run)
    assert found["no_data"]["text"] == text
    assert "only 10 batches an epoch on rank 1, up to 12 on the others" in found["uneven"]["text"]


@pytest.mark.soak
def test_the_rank_that_differs_from_the_majority_is_named(inspect: Inspect) -> None:
    run = inspect("loop", "changed", ranks=3)
    assert run.wait() == 4 and run.failure["rank"] == 1
    assert (
        "parameters differ at step 20: rank 1 against the other 2; 1 of 4, first 2.bias"
        in run.failure["summary"]
    )
    assert run.failure["where"].startswith(str(SCRIPTS / "inspected_loop.py:")), (
        "where the script called the inspector"
    )
