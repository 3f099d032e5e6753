"""What a plan passes to a task and gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from training.config.batch import Batch
from training.config.loader import Values
from training.config.schema import Config
from training.core import rundir
from training.data.corpus import CorpusSource
from training.host.decisions import Decision
from training.host.placement import Topology
from training.tasks.memory import StepNeeds

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import TaskFields
    from training.tasks.weights import Weights


class PlanRequest(Protocol):
    """The part of training.plan.request.Request that a task uses to decide."""

    config: Config
    options: FieldValues
    origins: dict[str, str]
    ranks: int
    place: Topology
    check: bool
    dry_run: bool
    config_file: Path | None
    resume_from: rundir.RunDir | None
    resumed: Values
    source: CorpusSource | None
    start: Weights | None  # --init_from

    def values(self) -> FieldValues: ...


@dataclass(frozen=True)
class Situation:
    """Decisions of the plan made before the task's. `room`: free bytes for one rank, None if
    unknown; `shared`: those of a GPU with the memory of the host."""

    device: str
    precision: Decision
    compiled: Decision
    room: int | None
    shared: bool = False

    @property
    def half(self) -> bool:
        """Whether activations have 16 bits, with fp8 too: only products are in it."""
        return self.precision.value in ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Decided:
    """Decisions of the task: `text` and `notes` for display, `fields` for the plan, `step` if its
    memory is known."""

    batch: Batch
    text: list[str]
    notes: list[str] = field(default_factory=list)
    fields: TaskFields = field(default_factory=lambda: cast("TaskFields", {}))
    step: StepNeeds | None = None

    def fits(self, room: int | None) -> bool:
        """As far as is known; `room`: of the situation."""
        return self.step is None or room is None or self.step.estimate.needed <= room
