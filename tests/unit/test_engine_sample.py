"""First and last output of rank 0."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.tasks.base import Task
from training.trainer import finish
from training.trainer.train_state import TrainState


def session(folder: Path, error: Exception | None, events: list[dict[str, Any]]) -> TrainState:
    """`error`: of the sample; None: it returns a number."""

    def sample(model: object, place: Path) -> Any:
        if error:
            raise error
        return 0.97

    run = SimpleNamespace(samples=folder, event=lambda kind, **facts: events.append(facts))
    task: Any = SimpleNamespace(sample=sample)
    task.checked_sample = partial(Task.checked_sample, task)
    made = SimpleNamespace(
        raw=torch.nn.Linear(1, 1),
        run=run,
        task=task,
        averaged=contextlib.nullcontext,
        autocast=contextlib.nullcontext(),
    )
    return cast("TrainState", made)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), ValueError("no"), UserError(Problem("a", "b"))],
)
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


def test_a_fault_injected_into_the_sample_is_one_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inject(phase: str) -> None:
        raise torch.OutOfMemoryError(phase)

    monkeypatch.setattr(finish.heartbeat.current, "beat", inject)
    events: list[dict[str, Any]] = []
    assert finish.sample(session(tmp_path / "samples", None, events)) is None
    assert [one["code"] for one in events] == ["warning.sample"]
    assert "OutOfMemoryError: sample at" in events[0]["text"]


def test_a_sample_that_is_not_a_text_leaves_a_complete_training(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    assert finish.sample(session(tmp_path / "samples", None, events)) is None
    assert (
        "sample() of SimpleNamespace returned float; it must be a text or None" in events[0]["text"]
    )


def test_banner_has_what_the_numbers_depend_on() -> None:
    def shown(deterministic: bool, compression: str | None) -> str:
        plan: Any = {"config": {"deterministic": deterministic}, "precision": {"value": "bf16"}}
        if compression:
            plan["gradient_compression"] = {"value": compression}
        return finish.numerics(plan)

    assert shown(False, None) == shown(False, "none") == "bf16"
    assert shown(True, "bf16") == f"bf16, deterministic, {msg('trainer.banner.compressed')}"
