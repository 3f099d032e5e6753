"""Weights of a run whose training replaces its checkpoints while they are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trained_runs import checkpoint, gpt, made
from training.core import manifest
from training.core.errors import UserError
from training.core.find_run import RunSelector
from training.tasks import trained, weights

ASKER = RunSelector("RUN", "./duet sample ", "./duet sample")


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_training_replaces_its_checkpoints_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run, model = made(tmp_path / "run", gpt(1)), gpt(1)
    found = weights.find(str(run.path), tmp_path, ASKER)

    def replaced() -> None:
        monkeypatch.undo()
        shape = manifest.read(run.checkpoints / "step_00000007")[0]["shape"]  # type: ignore[index]
        checkpoint(run, model.state_dict(), shape, 8)
        shutil.rmtree(run.checkpoints / "step_00000007")

    def read_before_it_was(one: weights.Weights) -> str:
        replaced()
        return ""

    if moment == "before":
        replaced()
    else:
        monkeypatch.setattr(weights.Weights, "damage", read_before_it_was)
    plan: Any = {**found.plan, "ranks": 9}
    used, state = trained.read_state(found.planned(plan))
    assert (used.step, used.plan["ranks"], bool(state)) == (8, 9, True)
    # one that was named itself is not replaced by another
    named = weights.find(str(run.checkpoints / "step_00000008"), tmp_path, ASKER)
    (run.checkpoints / "step_00000008").rename(run.checkpoints / "step_00000009")
    with pytest.raises(UserError) as raised:
        trained.read_state(named)
    assert [p.code for p in raised.value.problems] == ["weights.deleted"]
