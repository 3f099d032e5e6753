"""A run of an earlier version continues: tests/fixtures/runs/README.md."""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from training.core import manifest
from training.host import decisions

STORED = ROOT / "tests/fixtures/runs/zero_muon.tar.xz"
# Relative to the change of a matrix in three steps; momentum that starts at zero gives 0.44 to 1.06.
# The fixture is from a CPU without bf16 matrix instructions; where there are some, Muon uses them,
# which gives up to 0.09.
ROUNDING = 0.25 if decisions.cpu_bf16() else 1e-4


@pytest.mark.slow
def test_a_run_whose_ranks_shared_muon_by_zero_continues_as_there(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Losses, matrices and momentum are those of its own next three steps."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path / "experiments", filter="data")
    text = tmp_path / "experiments/notes.txt"
    run = launch("./launch_train.sh", "1", tiny=False, resume="zero", data=text).ok()
    theirs = json.loads((tmp_path / "experiments/step_6.json").read_text())
    assert list(run.steps) == [4, 5, 6]
    assert run.losses == pytest.approx(list(theirs["losses"].values()), rel=1e-4)
    before, after = (state(run, step) for step in (3, 6))
    for kind in ("weights", "momentum"):
        assert before[kind].keys() == theirs[kind].keys()
        for name, numbers in theirs[kind].items():
            start, ours = (
                some[kind][name].flatten()[:: theirs["every"]] for some in (before, after)
            )
            wanted = torch.tensor(numbers)
            apart = float((ours - wanted).norm() / (wanted - start).norm())
            assert math.isfinite(apart) and apart < ROUNDING, (kind, name)


def state(run: Launched, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and momentum of the matrices of a checkpoint."""
    folder = run.run.checkpoints / manifest.folder_name(step)
    saved: dict[str, Any] = torch.load(folder / manifest.STATE, weights_only=True)
    weights = {name: one for name, one in saved["model"].items() if name.startswith("blocks")}
    buffers = [one["momentum_buffer"] for one in saved["optimizer"][0]["state"].values()]
    return {"weights": weights, "momentum": dict(zip(weights, buffers, strict=True))}
