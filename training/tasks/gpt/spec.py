"""Spec of the task gpt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.config import batch
from training.config.schema import FIELDS, Config, Known
from training.core.errors import Problem
from training.core.messages import msg
from training.data.corpus import CorpusSource
from training.tasks.gpt import validation
from training.tasks.planning import Decided, PlanRequest, Situation
from training.tasks.spec import TaskSpec

if TYPE_CHECKING:
    import torch

    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.data.prepare import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.memory import StepNeeds

NAME = "gpt"


@dataclass(frozen=True)
class GptSpec(TaskSpec):
    """A language model on text. Its options are fields of the configuration."""

    unit: ClassVar[str] = "tokens"
    sizes: ClassVar[tuple[str, ...]] = validation.SIZES
    reads_text: ClassVar[bool] = True
    total_follows: ClassVar[bool] = False
    fp8: ClassVar[bool] = True
    lighter: ClassVar[str] = msg("tasks.gpt.model.lighter")

    @property
    def fields(self) -> Known:
        return FIELDS

    @property
    def run_name(self) -> str:
        return "run"

    def seq_len(self, config: Config) -> int:
        return config.max_seq_len

    def split(self, config: Config, origins: Mapping[str, str], ranks: int) -> batch.Batch | None:
        size = config.device_batch_size
        return (
            None
            if isinstance(size, str)
            else batch.split(size, config.max_seq_len, ranks, config.total_batch_size)
        )

    def divides(self, config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
        return validation.divides(config, origins, ranks)

    def check(
        self,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
        *,
        installed: bool,
        whole: bool,
    ) -> tuple[CorpusSource | None, list[Problem]]:
        return validation.check(config, origins, installed)

    def decide(self, request: PlanRequest, machine: Situation) -> Decided:
        from training.tasks.gpt import planning  # not needed to check a request

        return planning.decide(request, machine)

    def step(self, load: Mapping[str, Any]) -> StepNeeds:
        from training.tasks.gpt.memory import StepWorkload
        from training.tasks.gpt.step import GptStep

        return GptStep(StepWorkload(**load))

    def saved_model(self, saved: Mapping[str, Any]) -> FieldValues:
        return {**saved["shape"], "optimizer": saved["optimizer"]}

    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        from training.tasks.gpt.model import MemorySavings
        from training.tasks.gpt.task import LanguageModel

        assert data, "prepared by the supervisor or rank 0"
        selective = plan.get("selective_checkpointing")  # plans of earlier versions lack it
        savings = MemorySavings(
            plan["activation_checkpointing"]["value"],
            plan["loss_chunks"]["value"],
            selective["value"] if selective else 0,
        )
        fp8 = plan["precision"]["value"] == "fp8"
        return LanguageModel(Config(**plan["config"]), device, data, savings, fp8=fp8)

    def model_name(self, config: Mapping[str, Any]) -> str:
        return msg("tasks.gpt.model.name", depth=config["depth"])
