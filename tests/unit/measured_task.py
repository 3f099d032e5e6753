"""A task whose memory per step is measured by fake tensors, and its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.conftest import LAUNCH
from tests.unit.own_task import SIZED
from training import tasks
from training.core.contracts.plan import Plan
from training.plan import training_plan as planner
from training.tasks import fake_step, measurement
from training.tasks.measurement import Question
from training.tasks.sample_memory import SampleLoad, SampleStep

Write = Callable[..., str]
WEIGHTS = 64 * 256 + 256 + 256 + 1
CPU_ARGS = ("2", "--task=sized.py", "--device=cpu", "--precision=fp32")


@pytest.fixture
def sized(write: Write) -> str:
    return write("sized.py", SIZED)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in this process, which has torch already: another one takes seconds to import it."""

    def ask(question: Question) -> measurement.Answer:
        found: dict[str, Any] = fake_step.answer(question)
        step = SampleStep(SampleLoad(**found.pop("load")))
        return measurement.Answer(step, **found)

    monkeypatch.setattr(measurement, "ask", ask)


def question(
    path: str, sizes: list[int] | None, room: int | None = None, total: int = 0, **options: Any
) -> Question:
    spec = tasks.find(path, "")[0]
    given = {name: f.default for name, f in spec.own.items()} | options
    return Question(
        spec.record(given), {"task": path, "seed": 1}, sizes, room, 2, total, bf16=False, cuda=True
    )


def plan(*args: str) -> Plan:
    return planner.make(LAUNCH, list(args), {})[1]
