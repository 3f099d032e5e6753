"""summary.json, of the steps that count."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.finished_runs import plan, run
from training.core import heartbeat
from training.core.errors import Exit
from training.core.recorded_steps import RecordedSteps
from training.core.rundir import RunDir, append_json
from training.trainer import finish
from training.trainer.summary import render

__all__ = ["run"]  # a fixture


def written(run: RunDir, step: int, began: float = 0.0, resumed: int | None = None) -> Any:
    """The summary of a training that was stopped after this step."""
    session: Any = SimpleNamespace(
        run=run,
        task=SimpleNamespace(unit="tokens"),
        position=SimpleNamespace(step=step if resumed is None else resumed),
        parameters=450_000,
        raw=torch.nn.Linear(3, 4),
        loss_scale=None,
    )
    recorder: Any = SimpleNamespace(flush=lambda: None)
    position: Any = SimpleNamespace(step=step, tokens=1_638_400)
    known: Any = plan() | {"launch": "ab"}
    return finish.write_summary(session, known, recorder, position, Exit.PREEMPTED, began)


def trains(run: RunDir, first: int, last: int, **figures: Any) -> None:
    for step in range(first, last + 1):
        known = {"step_ms": 10.0, "mfu": None, "tokens_per_s": 5.0, "memory_bytes": [None, step]}
        append_json(run.metrics, {"step": step, "loss": float(step), **known, **figures})


def evaluates(run: RunDir, step: int, score: float) -> None:
    append_json(run.metrics, {"step": step, "val_bpb": score})
    append_json(run.events, {"time": 1.0, "event": "eval", "step": step, "val_bpb": score})


def resumes(run: RunDir, step: int) -> None:
    append_json(run.events, {"time": 2.0, "event": "resume", "step": step})


def test_the_summary_is_of_the_steps_that_count(run: RunDir) -> None:
    """In a resumed run the last record of a step, and none of a discarded part."""
    trains(run, 1, 9)
    evaluates(run, 4, 3.0)
    evaluates(run, 8, 2.0)
    trains(run, 10, 12, memory_bytes=[99])
    resumes(run, 6)
    trains(run, 7, 7, loss=None)
    trains(run, 8, 9, loss=0.5, step_ms=30.0, mfu=0.25)
    trains(run, 10, 10, loss=0.25, step_ms=30.0)
    found = written(run, 9)
    assert (found["loss_first"], found["loss_last"], found["memory_bytes"]) == (1.0, 0.5, 9)
    assert (found["step_ms"], found["mfu"], found["tokens_per_s"]) == (10.0, 0.25, 5.0)
    assert "joules_per_unit" in found and found["joules_per_unit"] is None
    assert (found["val_bpb_first"], found["val_bpb_last"]) == (3.0, 3.0)


def test_the_memory_is_that_of_the_last_start(run: RunDir) -> None:
    """One before an out-of-memory had a larger batch than the estimate."""
    trains(run, 1, 4, memory_bytes=[90, None])
    trains(run, 5, 8, memory_bytes=[40, 50])
    assert written(run, 8, resumed=4)["memory_bytes"] == 50
    assert written(run, 8, resumed=8)["memory_bytes"] == 90  # nothing was left to train


def test_the_speed_is_that_of_the_last_start(run: RunDir) -> None:
    """The one before had a GPU."""
    trains(run, 1, 8, mfu=0.4, joules_per_unit=0.1)
    trains(run, 9, 12, step_ms=90.0, tokens_per_s=1.0)
    found = written(run, 12, resumed=8)
    assert (found["step_ms"], found["tokens_per_s"]) == (90.0, 1.0)
    assert found["mfu"] is None and found["joules_per_unit"] is None
    only_one = written(run, 9, resumed=8)
    assert (only_one["step_ms"], only_one["mfu"]) == (10.0, 0.4), "its only step is warm-up"


def test_an_evaluation_that_is_repeated_after_a_resume_counts(run: RunDir) -> None:
    trains(run, 1, 8)
    evaluates(run, 8, 2.0)
    resumes(run, 6)
    trains(run, 7, 8)
    evaluates(run, 8, 1.5)
    assert written(run, 8)["val_bpb_last"] == 1.5


def test_a_loss_that_is_not_a_number_stays_in_the_summary(run: RunDir) -> None:
    trains(run, 1, 2)
    trains(run, 3, 3, loss=math.nan)
    assert math.isnan(written(run, 3)["loss_last"])


def test_the_summary_of_many_steps_needs_little_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a phase of its own, since it may take long."""
    steps, phases = 5000, list[str]()
    monkeypatch.setattr(heartbeat, "current", SimpleNamespace(beat=phases.append))
    trains(run, 1, 1)
    record = json.loads(run.metrics.read_text())
    lines = (json.dumps(record | {"step": step}) for step in range(1, steps + 1))
    run.metrics.write_text("\n".join(lines))
    tracemalloc.start()
    RecordedSteps(run, steps, ("step_ms", "mfu"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * steps
    written(run, steps)
    assert phases == ["summary"]


def test_a_training_without_a_recorded_step_has_a_summary(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete run whose metrics.jsonl was deleted, and that is resumed."""
    began = time.monotonic() - 60
    monkeypatch.setattr(time, "time", lambda: 1e9)  # a clock that was set back
    found = written(run, 400, began)
    assert 60 <= found["seconds"] < 120
    known: Any = plan() | {"launch": "ab"}
    text = render(run, known)
    assert "0.45 M parameters" in text
    assert "nan" not in text and "--resume" in text
