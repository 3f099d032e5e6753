"""Task spec: options, checks, plan and texts of a task. All code except the ranks uses the spec and
no task names. No torch; the class that trains is training.tasks.base.Task, which `make` returns."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.config.batch import Batch
from training.config.loader import ConfigFile, Values
from training.config.schema import FIELDS, Config, Known, shared
from training.core.errors import Problem
from training.core.messages import msg
from training.core.phases import WITHOUT_BATCH
from training.data.corpus import CorpusSource
from training.tasks import own_error
from training.tasks.memory import StepNeeds
from training.tasks.planning import Decided, PlanRequest, Situation

if TYPE_CHECKING:
    import torch

    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan, TaskFields, TaskRecord
    from training.core.contracts.run_files import ManifestRecord
    from training.data.prepared_corpus import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.trained import Trained
    from training.tasks.weights import Weights


@dataclass(frozen=True)
class TaskSpec(ABC):
    """`own`: the task's own options, fields like the common ones; `file`: of a user's task."""

    name: str
    own: Known = field(default_factory=dict)
    file: Path | None = None

    unit: ClassVar[str] = "samples"  # unit of batch size and speed
    sizes: ClassVar[tuple[str, ...]]  # fields that determine its batch
    reads_text: ClassVar[bool] = False  # whether text must be prepared before the ranks train
    # whether workers read the validation data, beside those of the epoch: no most_readers = 0
    validation_workers: ClassVar[bool] = True
    total_follows: ClassVar[bool]  # total_batch_size follows from the ranks if not set
    fp8: ClassVar[bool] = False  # whether its model computes in fp8 if asked
    writes_text: ClassVar[bool] = False  # whether its model continues a prompt
    # own options whose change by a resume does not affect what is learnt: other training data is
    # found by comparing it (training.trainer.same_data)
    harmless: ClassVar[frozenset[str]] = frozenset()
    lighter: ClassVar[str]  # what to try if the smallest micro-batch does not fit

    @property
    def fields(self) -> Known:
        """Every field that the command line or a config may set."""
        return {n: f for n, f in FIELDS.items() if shared(n)} | dict(self.own)

    @property
    def run_name(self) -> str:
        """Default name of a run."""
        return Path(self.name).stem

    def record(self, options: Mapping[str, Any]) -> TaskRecord:
        """Record for the plan."""
        return {
            "name": self.name,
            "unit": self.unit,
            "file": str(self.file) if self.file else None,
            "options": dict(options),
        }

    # Request.

    def located(self, options: Mapping[str, Any], plan: Plan) -> Mapping[str, Any]:
        """The options of a run with the paths that they meant where the run of this plan was
        started."""
        return options

    def seq_len(self, config: Config) -> int:
        """Units per sample."""
        return 1

    @abstractmethod
    def split(self, config: Config, origins: Mapping[str, str], ranks: int) -> Batch | None:
        """The batch as far as it is known without examining the machine; None if not divisible or
        auto."""

    @abstractmethod
    def divides(self, config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
        """A batch that is not divisible, with the nearest that are."""

    def check(
        self,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
        *,
        installed: bool,
        whole: bool,
    ) -> tuple[CorpusSource | None, list[Problem]]:
        """Text to train on, for a task that reads text, and problems of its options and data; fast.
        `installed`: this interpreter has the packages; `whole`: all options are final."""
        return None, []

    def parameters(self, config: Config) -> int | None:
        """The parameters of the model; None: unknown without building it."""
        return None

    def model(
        self,
        config: Config,
        options: Mapping[str, Any],
        saved: ManifestRecord | None,
        resumed: Values,
    ) -> FieldValues:
        """Known properties of the model by their names in a checkpoint (saved_model). `saved`: the
        checkpoint from which a run with the values `resumed` continues."""
        return dict(options)

    # Plan.

    @abstractmethod
    def decide(self, request: PlanRequest, machine: Situation) -> Decided:
        """Batch and memory, with lines for the plan."""

    @abstractmethod
    def step(self, load: Mapping[str, Any]) -> StepNeeds:
        """The step of a plan's memory.load."""

    def memory_text(self, plan: Plan | TaskFields) -> list[str]:
        """Plan lines about the memory of a step, from the decisions in the plan."""
        return []

    def memory_notes(self, plan: Plan) -> list[str]:
        """Notes of the plan that hold only for its micro-batch."""
        return []

    def lighter_in(self, phase: str) -> str | None:
        """What to try if this phase does not fit the memory; None: a smaller micro-batch."""
        return msg("tasks.spec.lighter_model") if phase in WITHOUT_BATCH else None

    def savings(self, plan: Plan) -> FieldValues:
        """Fields that save the most memory of the same model and micro-batch; {}: none are left."""
        return {}

    def lighter_than(self, plan: Plan) -> str:
        """What to try if the smallest micro-batch of this plan does not fit."""
        if not (found := self.savings(plan)):
            return self.lighter
        flags = " ".join(f"--{name}={value}" for name, value in found.items())
        return msg("tasks.spec.lighter_first", flags=flags, lighter=self.lighter)

    def learning_rates(self, plan: Plan) -> dict[str, float]:
        """Options that are learning rates, with their values."""
        return {
            name: float(value)
            for name, value in plan["task"]["options"].items()
            if name == "learning_rate" or name.rpartition("_")[2] == "lr"
            if isinstance(value, int | float) and value > 0
        }

    def memory_fields(self, plan: Plan) -> FieldValues:
        """Fields whose values repeat what the plan has decided to save memory, apart from the
        micro-batch."""
        return {}

    def saved_model(self, saved: Mapping[str, Any]) -> FieldValues:
        """Model fields in a checkpoint's manifest."""
        return dict(saved["shape"])

    # Config files in other formats, which select this task.

    def read_config(self, path: Path, text: str, ranks: int) -> ConfigFile | None:
        """The config if the text of a .json file is in such a format. `ranks`: 0 if unknown."""
        return None

    def login_key(self, path: Path) -> str | None:
        """The W&B key in such a file. Never write it anywhere."""
        return None

    # Ranks and summary.

    @abstractmethod
    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        """The planned task on this rank, with torch. `data`: for tasks that read text."""

    # Trained weights (training.tasks.weights).

    def trained(
        self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> Trained:
        """The model with these tensors. Raises RuntimeError if they are of another model, and
        UserError for an error of a user's task."""
        from training.tasks import math_modes, randomness
        from training.tasks.gpu_error import of_gpu
        from training.tasks.trained import Trained

        seed = Config(**weights.plan["config"]).seed
        with randomness.apart(), own_error.reported(self.file, of_gpu):
            randomness.seed(seed)  # in the order of a training, so that a task's split is the same
            task = self.make(weights.plan, device, None)
            randomness.seed(seed)
            with math_modes.as_trained(weights.plan, device):
                model = task.checked_model()
                drawn, modes = randomness.state(), math_modes.current()

        def of_weights(error: Exception) -> bool:
            own = own_error.in_loading(error) and not of_gpu(error)
            return isinstance(error, RuntimeError) and not own

        with own_error.reported(self.file, of_weights):
            model.load_state_dict(state)
        return Trained(weights, model, device, task, drawn, modes)

    def aim(self, plan: Plan, given: Mapping[str, str]) -> tuple[Plan, list[Problem]]:
        """The plan of trained weights with other validation data: `given` has the fields data,
        text_field and encoding as far as they were typed. And problems of the data. No torch."""
        if not given:
            return plan, []
        what = msg("tasks.spec.own_data", task=self.name)
        return plan, [Problem("task.unsupported", what, msg("tasks.spec.own_data_allowed"))]

    def restores(self, weights: Weights) -> list[Problem]:
        """Why these weights cannot restore the frames of a video. No torch."""
        what = msg("tasks.spec.no_frames", name=weights.name, task=self.name)
        fixes = [f"./duet sample {shlex.quote(weights.name)}"] if self.writes_text else []
        return [Problem("task.unsupported", what, msg("tasks.spec.frames_wanted"), fixes)]

    def fields_of(self, weights: Weights) -> FieldValues:
        """Fields that determine the model, as these weights need them."""
        options = weights.plan["task"]["options"]
        return {name: options[name] for name in weights.facts["shape"] if name in options}

    def differences(
        self,
        weights: Weights,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
    ) -> list[Problem]:
        """Why a model of this configuration cannot have these weights, one problem per field."""
        return [
            self.differs(weights, name, value, options[name], origins[name])
            for name, value in self.fields_of(weights).items()
            if options.get(name, value) != value
        ]

    def differs(
        self, weights: Weights, name: str, theirs: object, value: object, origin: str
    ) -> Problem:
        what = msg(
            "tasks.spec.differs",
            name=name,
            value=value,
            origin=origin,
            title=weights.title,
            theirs=theirs,
        )
        allowed = msg("tasks.spec.same_model")
        return Problem(
            "init.differs", what, allowed, [f"--{name}={shlex.quote(str(theirs))}"], name
        )

    def sizes_in(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Sizes of the model that has tensors of these shapes, under the names of their fields
        where there are such; empty if unknown."""
        return {}

    def unfit(
        self,
        weights: Weights,
        shapes: Mapping[str, Sequence[int]],
        config: Config,
        origins: Mapping[str, str],
    ) -> list[Problem]:
        """As differences, for a file of tensors of another program."""
        return []

    def model_name(self, config: Mapping[str, Any]) -> str:
        """Model name for the summary."""
        return self.name
