"""`make gpu`, stage correctness: what passes for the same training, and the whole stage on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench, correctness, draw, machine, trainings
from training.core.rundir import RunDir

NO_GPU = {"name": "no GPU", "memory_bytes": 1 << 34, "capability": [9, 0]}
CURVE = [5.77, 4.55, 3.16, 3.97, 3.45, 3.12]


def laboratory(folder: Path, limit_s: float = 30.0, **changes: Any) -> bench.Bench:
    """Two ranks have a device each."""
    facts: dict[str, Any] = {"executable": sys.executable, "python": "3.12", "torch": "2.13.0"}
    facts |= {"cuda": None, "nccl": None, "driver": None, "gpus": [NO_GPU] * 2, "missing": []}
    facts |= {"peer_access": False}
    facts |= {"null_gpu": False, "cpu": "CPU", "cores": 2, "memory_bytes": 1 << 34}
    facts |= changes
    return bench.Bench(machine.Machine(**facts), folder, folder / "cache", True, None, limit_s)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs that the machine has not can reach each other."""
    monkeypatch.setattr(correctness, "_connected", lambda *_: [])


def test_the_distance_of_two_curves() -> None:
    assert correctness._apart([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.1)
    assert correctness._apart([2.0, 1.0], [2.0]) == float("inf")
    for wrong in (float("nan"), float("inf")):
        assert correctness._apart([2.0, 1.0, 1.0], [2.0, wrong, 1.0]) == float("inf")
        assert correctness._apart([2.0, wrong, 1.0], [2.0, wrong, 1.0]) == float("inf")


def test_another_training_is_not_near() -> None:
    for limit in {way.limit for way in correctness.WAYS.values()}:
        within = [loss * (1 + limit / 2) for loss in CURVE]
        late = [CURVE[0], *CURVE[:-1]]  # a step that changed nothing
        for curve, ok in ((CURVE, True), (within, True), (late, False), (CURVE[:-1], False)):
            assert correctness.near("GPU", curve, CURVE, limit)["ok"] is ok


def test_each_curve_is_drawn() -> None:
    curves = {str(number): CURVE for number in range(12)}
    assert draw.lines(curves, "step").count("<polyline") == 12


@pytest.mark.parametrize(
    ("code", "last", "failed"),
    [
        (137, 1.0, []),
        (0, 1.0, list(correctness.LIMITS_OF_RESUMED)),
        (137, 1.0000001, [correctness.REPEATED]),
        (137, 1.1, list(correctness.LIMITS_OF_RESUMED)),
    ],
    ids=["resumed", "not killed", "other bits", "another training"],
)
def test_a_run_that_is_killed_and_resumed(
    tmp_path: Path,
    code: int,
    last: float,
    failed: list[str],
    connected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*arguments: Any, **flags: Any) -> trainings.Run:
        class Trained(trainings.Run):
            losses = [1.0] * 11 + [last if flags.get("resume") else 1.0]

        return Trained(RunDir(tmp_path), code if flags.get("inject") else 0, 0.0, "")

    monkeypatch.setattr(correctness, "train", train)
    checks = correctness.run(laboratory(tmp_path))["checks"]
    assert [c["name"].partition(": ")[2] for c in checks if not c["ok"]] == failed


@pytest.mark.parametrize("null_gpu", [False, True])
def test_replicas_are_compared_where_a_gpu_computes(
    tmp_path: Path, connected: None, monkeypatch: pytest.MonkeyPatch, null_gpu: bool
) -> None:
    """Nothing is claimed that was not compared."""
    compared: set[object] = set()

    def train(lab: bench.Bench, name: str, **flags: Any) -> trainings.Run:
        class Trained(trainings.Run):
            losses = [1.0] * 12

        compared.add(flags["inspect_every"])
        return Trained(RunDir(tmp_path), 0, 0.0, "")

    monkeypatch.setattr(correctness, "train", train)
    checks = correctness.run(laboratory(tmp_path, null_gpu=null_gpu))["checks"]
    claimed = "replicas are equal" in [check["name"] for check in checks]
    assert compared == {int(claimed)} and claimed is not null_gpu


def test_a_training_that_fails_does_not_cost_the_others(
    tmp_path: Path, connected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = correctness.REPEATED

    def train(lab: bench.Bench, name: str, **flags: Any) -> trainings.Run:
        class Trained(trainings.Run):
            losses = [1.0] * 12

        code = 1 if name == correctness._folder(broken) or flags.get("inject") else 0
        return Trained(RunDir(tmp_path), code, 0.0, "")

    monkeypatch.setattr(correctness, "train", train)
    found = correctness.run(laboratory(tmp_path))
    assert [c["name"] for c in found["checks"] if not c["ok"]] == [broken, "replicas are equal"]
    assert set(found["resumed_is_identical"]) == {correctness.TWO} and len(found["notes"]) == 1
    with pytest.raises(bench.Failed) as late:
        correctness.run(laboratory(tmp_path, limit_s=0.0))
    assert set(late.value.found["curves"]) == set(found["curves"]), "kept"


def test_gpus_that_do_not_reach_each_other_start_no_training_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def train(lab: bench.Bench, name: str, ranks: int = 1, **flags: Any) -> trainings.Run:
        class Trained(trainings.Run):
            losses = [1.0] * 12

        started.append(ranks)
        return Trained(RunDir(tmp_path), 0, 0.0, "")

    (tmp_path / "duet").write_text("echo the copies hang; exit 3\n")
    monkeypatch.setattr(correctness, "train", train)
    monkeypatch.setattr(correctness.project, "script", lambda name: ["bash", str(tmp_path / name)])
    found = correctness.run(laboratory(tmp_path))
    assert set(started) == {1} and "the copies hang" in found["notes"][0]
    bad = [c["name"] for c in found["checks"] if not c["ok"]]
    assert bad == ["test of the communication", "replicas are equal"]


def test_the_ways_of_a_machine() -> None:
    here, old = Path(), {**NO_GPU, "name": "Tesla T4", "capability": [7, 5]}
    assert correctness._ways(laboratory(here), []) == correctness.WAYS
    without = correctness._ways(laboratory(here, no_compiler="gcc"), notes := [])
    assert set(correctness.WAYS) - set(without) == {"GPU, 1 rank, compiled"} and len(notes) == 1
    in_fp32 = correctness._ways(laboratory(here, gpus=[old] * 2), notes)
    assert {way.flags["precision"] for way in in_fp32.values()} == {"fp32"} and len(notes) == 2


@pytest.mark.soak
@pytest.mark.timeout(1800)  # two minutes on an idle machine
def test_the_stage_on_a_cpu_finds_the_wrong_run(
    tmp_path: Path, connected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trainings on the CPU: they are the same, except one with another learning rate."""
    wrong = "GPU, 1 rank, Muon"

    def train(lab: bench.Bench, name: str, **flags: Any) -> trainings.Run:
        own = {"matrix_lr": 0.04} if name == correctness._folder(wrong) else {}
        return trainings.train(lab, name, **flags | own | {"device": "cpu"})

    monkeypatch.setattr(correctness, "train", train)
    found = correctness.run(laboratory(tmp_path, limit_s=1700.0))
    assert [c["name"] for c in found["checks"] if not c["ok"]] == [wrong]
    assert found["resumed_is_identical"] == dict.fromkeys(correctness.LIMITS_OF_RESUMED, True)
