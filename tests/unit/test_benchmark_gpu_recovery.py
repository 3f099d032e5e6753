"""The stage of `make gpu` that recovers from out of memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench, recovery, trainings
from tests.cases import each
from tests.unit.test_benchmark_gpu import laboratory
from training.core.rundir import RunDir

SNAPSHOT = {
    "segments": [
        {"device": 0, "total_size": 3 << 30, "blocks": [{"size": 3 << 30, "state": "inactive"}]}
    ]
}


@each(("snapshot", "reserved"), [(SNAPSHOT, 3 << 30), ({"segments": []}, 0), (None, 0)])
def test_the_memory_of_the_failure_must_be_kept(
    snapshot: dict[str, Any] | None, reserved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(lab: bench.Bench, name: str, **flags: Any) -> trainings.Run:
        one = trainings.Run(RunDir(tmp_path / name), 0, 0.0, "")
        one.folder.ranks.mkdir(parents=True)
        if snapshot is not None:
            one.folder.memory_snapshot(0).write_bytes(pickle.dumps(snapshot))
        return one

    monkeypatch.setattr(recovery, "launch", launch)
    found = recovery.run(laboratory(tmp_path))
    assert found["reserved_bytes"] == reserved
    assert [one["ok"] for one in found["checks"]][-1] is (reserved > 0)


def test_batches_of_restarts_in_words() -> None:
    assert recovery.sizes([[8, 4]]) == "8 → 4"
    assert recovery.sizes([[8, 4], None, [4, 2]]) == "8 → 4, unchanged, 4 → 2"
