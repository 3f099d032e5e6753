"""The loops that `make gpu` compares, if one fails or no time is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench, speed, trainings
from tests.unit.test_benchmark_gpu import laboratory, session, stage
from training.core.rundir import RunDir

LOAD = {"depth": 2, "sequences": 4, "seq_len": 32, "vocab": 320, "total_tokens": 256}
LOAD |= {"blocks": 0, "selective": 0, "chunks": 1, "muon": True, "compiled": False}
PLAN = {
    "memory": {"load": LOAD, "total_bytes": 3 << 30, "context_bytes": 1 << 30},
    "precision": {"value": "bf16"},
    "compile": {"value": False, "reason": "gcc is missing"},
}
TIMES = {"duet": 10.0, "bare_loop": 11.0, "nanochat_loop": 20.0}


class Trained(trainings.Run):
    peak_bytes = 1 << 30

    def step_ms(self, warm_up: int = 0) -> float:
        return TIMES["duet"]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Programs that fail; all others are measured."""
    names: set[str] = set()

    def ended(name: str) -> None:
        if name in names:
            raise bench.Failed(f"{name}: exit status 1\nout of memory")

    def train(lab: bench.Bench, name: str, *config: str, **flags: object) -> trainings.Run:
        ended(name)
        one = Trained(RunDir(lab.folder / "none"), 0, 0.0, "")
        vars(one)["plan"] = PLAN
        return one

    def result(lab: bench.Bench, module: str, name: str, *rest: Any, **env: str) -> dict[str, Any]:
        ended(name)
        return {"step_ms": TIMES[module]}

    monkeypatch.setattr(speed, "train", train)
    monkeypatch.setattr(bench.Bench, "result", result)
    return names


def with_nanochat(folder: Path, **changes: Any) -> bench.Bench:
    lab = laboratory(folder, **changes)
    lab.nanochat = folder
    return lab


def test_a_bare_loop_that_fails_costs_only_its_own_figures(
    tmp_path: Path, failing: set[str]
) -> None:
    failing.add("bare_loop0")
    found = speed.run(with_nanochat(tmp_path), "conservative")
    assert {name: loop["step_ms"] for name, loop in found["loops"].items()} == {
        speed.DUET: 10.0,
        speed.NANOCHAT: 20.0,
    }
    assert [c["name"] for c in found["checks"] if not c["ok"]] == ["no slower than a bare loop"]
    notes = "\n".join(found["notes"])
    assert "gcc is missing" in notes and "out of memory" in notes and "the same 4" in notes
    with pytest.raises(bench.Failed):
        speed.run(laboratory(tmp_path, limit_s=0.0), "conservative")


@pytest.mark.parametrize(
    ("late", "limit_s", "measured", "checks"),
    [
        ("duet0", 0.0, [], 0),
        ("bare_loop0", 0.0, [speed.DUET], 1),
        ("nanochat_loop0", 0.0, [speed.DUET, speed.BARE], 2),
        ("duet1", 30.0, [speed.DUET, speed.BARE, speed.NANOCHAT], 2),
    ],
)
def test_what_was_measured_before_the_limit_is_kept(
    tmp_path: Path, failing: set[str], late: str, limit_s: float, measured: list[str], checks: int
) -> None:
    failing.add(late)

    def run(_: bench.Bench) -> dict[str, Any]:
        lab = with_nanochat(tmp_path, limit_s=limit_s)
        lab.smoke = False
        return speed.run(lab, "conservative")

    record = session(tmp_path).measure(stage(run))
    assert record["status"] == "failed" and record["reason"].startswith(late)
    assert list(record["figures"].get("loops", {})) == measured
    assert len(record["checks"]) == checks and all(one["ok"] for one in record["checks"])
