"""What a plan asks of a task, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from training.config.batch import Batch
from training.config.loader import Values
from training.config.schema import Config
from training.core import rundir
from training.data.corpus import CorpusSource
from training.tasks.gpt.memory import StepWorkload

if TYPE_CHECKING:
    from training.core.contracts.plan import TaskFields


class PlanRequest(Protocol):
    """Of a request (training.plan.request.Request): what a task needs to decide."""

    config: Config
    ranks: int
    config_file: Path | None
    resume_from: rundir.RunDir | None
    resumed: Values
    source: CorpusSource | None


@dataclass(frozen=True)
class Decided:
    """What depends on the task: `text` and `notes` for people, `fields` of the plan, `load` on the memory where it is known."""

    batch: Batch
    text: list[str]
    notes: list[str] = field(default_factory=list)
    fields: TaskFields = field(default_factory=lambda: cast("TaskFields", {}))
    shape: dict[str, int] = field(default_factory=dict)  # of the model, as its checkpoints tell it; empty: not known before they are read
    load: StepWorkload | None = None
