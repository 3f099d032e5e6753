"""What a task is to everything but the ranks: its options, checks, plan and words. The rest of the
house asks this and knows no task by name. No torch here; the class that trains is
training.tasks.base.Task, which `make` gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.config.batch import Batch
from training.config.loader import ConfigFile
from training.config.schema import FIELDS, Config, Known, shared
from training.core.errors import Problem
from training.data.corpus import CorpusSource
from training.tasks.memory import StepNeeds
from training.tasks.planning import Decided, PlanRequest, Situation

if TYPE_CHECKING:
    import torch

    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan, TaskRecord
    from training.data.prepare import PreparedCorpus
    from training.tasks.base import Task


@dataclass(frozen=True)
class TaskSpec(ABC):
    """`own`: its options beside the fields that every training has, as fields of the same make;
    `file`: of a user's own task."""

    name: str
    own: Known = field(default_factory=dict)
    file: Path | None = None

    unit: ClassVar[str] = "samples"  # what its batches and speed count
    sizes: ClassVar[tuple[str, ...]]  # the fields that its batch is made of
    reads_text: ClassVar[bool] = False  # is there text to be prepared before the ranks train?
    total_follows: ClassVar[bool]  # from the ranks, where nobody has said total_batch_size
    lighter: ClassVar[str]  # what to try when the smallest micro-batch does not fit

    @property
    def fields(self) -> Known:
        """Every field that a command line or a config may set."""
        return {n: f for n, f in FIELDS.items() if shared(n)} | dict(self.own)

    @property
    def run_name(self) -> str:
        """Of a run that neither the user nor a config file names."""
        return Path(self.name).stem

    def record(self, options: Mapping[str, Any]) -> TaskRecord:
        """For the plan."""
        return {
            "name": self.name,
            "unit": self.unit,
            "file": str(self.file) if self.file else None,
            "options": dict(options),
        }

    # The request.

    def seq_len(self, config: Config) -> int:
        """Units of one sample."""
        return 1

    @abstractmethod
    def split(self, config: Config, origins: Mapping[str, str], ranks: int) -> Batch | None:
        """The batch as far as it is known without looking at the machine; None where it does not
        divide, or is auto."""

    @abstractmethod
    def divides(self, config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
        """A batch that does not divide, with the nearest that do."""

    def check(
        self,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
        *,
        installed: bool,
        whole: bool,
    ) -> tuple[CorpusSource | None, list[Problem]]:
        """The text to train on, of a task that reads some, and what is wrong with its options and
        data; quick. `installed`: this interpreter has the packages; `whole`: every option is what
        the user meant."""
        return None, []

    # The plan.

    @abstractmethod
    def decide(self, request: PlanRequest, machine: Situation) -> Decided:
        """Batch, memory and what to say of them."""

    @abstractmethod
    def step(self, load: Mapping[str, Any]) -> StepNeeds:
        """Of what a plan holds as memory.load."""

    def saved_model(self, saved: Mapping[str, Any]) -> FieldValues:
        """What a checkpoint's manifest says of its model."""
        return dict(saved["shape"])

    # Config files of another vocabulary, which ask for this task.

    def reads_config(self, text: str) -> bool:
        """Is this text of a .json file one of them?"""
        return False

    def load_config(self, path: Path, text: str, ranks: int) -> ConfigFile:
        raise NotImplementedError(f"{self.name} has no config files of its own")

    def login_key(self, path: Path) -> str | None:
        """The key for W&B that such a file holds. Never write it anywhere."""
        return None

    # The ranks and what is said of a run.

    @abstractmethod
    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        """The planned task on this rank, with torch. `data`: of a task that reads text."""

    def model_name(self, config: Mapping[str, Any]) -> str:
        """For the summary."""
        return self.name
