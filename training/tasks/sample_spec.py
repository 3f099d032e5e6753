"""Base spec of tasks that count samples: the batch, and a step measured by fake tensors, since
there is no formula for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from training.config.batch import Batch
from training.config.schema import Config
from training.core.errors import Problem
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.tasks import sample_batch
from training.tasks.planning import Decided, PlanRequest, Situation
from training.tasks.sample_memory import SampleLoad, SampleStep
from training.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan, TaskFields


@dataclass(frozen=True)
class SampleSpec(TaskSpec):
    sizes: ClassVar[tuple[str, ...]] = sample_batch.SIZES
    total_follows: ClassVar[bool] = True
    lighter: ClassVar[str] = msg("tasks.sample.spec.lighter")

    def split(self, config: Config, origins: Mapping[str, str], ranks: int) -> Batch | None:
        return sample_batch.split(config, origins, ranks)

    def divides(self, config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
        return sample_batch.divides(config, origins, ranks)

    def of_data(self, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Plan lines, and notes, about the data named by the options; after check()."""
        return [], []

    def decide(self, request: PlanRequest, machine: Situation) -> Decided:
        from training.tasks import sample_plan

        shown = (
            msg("tasks.sample.spec.task_file", name=self.name, file=self.file)
            if self.file
            else msg("tasks.sample.spec.task", name=self.name)
        )
        decided = sample_plan.decide(request, machine, self.record(request.options))
        lines, notes = self.of_data(request.options)
        return replace(
            decided,
            text=[shown, *lines, *decided.text, *self.memory_text(decided.fields)],
            notes=[*notes, *decided.notes],
        )

    def memory_text(self, plan: Plan | TaskFields) -> list[str]:
        if "memory" not in plan:
            return []
        step = self.step(plan["memory"]["load"])
        word, estimated = memory_word(step.on_gpu), step.estimate.sentence()
        return [msg("tasks.sample.plan.measured", memory=word, estimated=estimated)]

    def step(self, load: Mapping[str, Any]) -> SampleStep:
        return SampleStep(SampleLoad(**load))
