"""The sample after the last step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from training.core.errors import UserError
from training.trainer import finish
from training.trainer.train_state import TrainState


def session(folder: Path, error: Exception, events: list[dict[str, Any]]) -> TrainState:
    def sample(model: object, place: Path) -> str:
        raise error

    run = SimpleNamespace(samples=folder, event=lambda kind, **facts: events.append(facts))
    made = SimpleNamespace(
        raw=torch.nn.Linear(1, 1),
        run=run,
        task=SimpleNamespace(sample=sample),
        averaged=contextlib.nullcontext,
        autocast=contextlib.nullcontext(),
    )
    return cast("TrainState", made)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("no")])
def test_a_failed_sample_leaves_a_complete_training(error: Exception, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    folder = tmp_path / "samples"
    assert finish.sample(session(folder, error, events)) is None
    ((code, text),) = [(one["code"], one["text"]) for one in events]
    assert code == "warning.sample"
    assert text.startswith(
        f"no sample of the trained model: {type(error).__name__}: {error} at {__file__}:"
    )
    assert not folder.exists()


def test_an_error_that_the_user_can_mend_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        finish.sample(session(tmp_path / "samples", UserError([]), []))
