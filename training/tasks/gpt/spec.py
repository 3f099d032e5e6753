"""Spec of the task gpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.config import batch
from training.config.loader import Values
from training.config.schema import FIELDS, Config, Known
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import corpus, optional_deps, tokenizer, tokenizer_base
from training.data import encoding as text_encoding
from training.data.corpus import CorpusSource
from training.data.tokenizer import vocab_of
from training.tasks.gpt import validation
from training.tasks.gpt.model_dims import ROWS, ModelDims, of_checkpoint, sizes_in
from training.tasks.gpt.rates import MATRIX_LR
from training.tasks.planning import Decided, PlanRequest, Situation
from training.tasks.spec import TaskSpec

if TYPE_CHECKING:
    import torch

    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan, TaskFields
    from training.core.contracts.run_files import ManifestRecord
    from training.data.prepared_corpus import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.gpt.trained import TrainedGpt
    from training.tasks.memory import StepNeeds
    from training.tasks.weights import Weights

NAME = "gpt"
OF_WEIGHTS = ("depth", "key_offset")  # fields that weights determine


def _tokenizer(weights: Weights) -> str | None:
    """The value of --tokenizer for these weights; None: its file is lost."""
    identity = weights.facts["tokenizer"]
    if identity in (None, tokenizer_base.BYTES):
        return tokenizer_base.BYTES
    files = [file for folder in weights.folders if (file := tokenizer.file_in(folder))]
    return next((str(file) for file in files if tokenizer.checksum(file) == identity), None)


def _same_tokenizer(chosen: str, theirs: str) -> bool:
    """Whether the vocabulary is the same file; one trained on the data is another."""
    names = (tokenizer_base.BYTES, tokenizer_base.BPE)
    if chosen in names or theirs in names:
        return chosen == theirs
    file = tokenizer.expanded(chosen)
    return file.is_file() and tokenizer.checksum(file) == tokenizer.checksum(Path(theirs))


@dataclass(frozen=True)
class GptSpec(TaskSpec):
    """A language model on text. Its options are fields of the configuration."""

    unit: ClassVar[str] = "tokens"
    sizes: ClassVar[tuple[str, ...]] = validation.SIZES
    reads_text: ClassVar[bool] = True
    validation_workers: ClassVar[bool] = False
    total_follows: ClassVar[bool] = False
    fp8: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
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

    def parameters(self, config: Config) -> int | None:
        try:
            vocab = vocab_of(config.tokenizer, config.vocab_size)
        except (OSError, UserError, ValueError):  # reported by check()
            return None
        return ModelDims(config.depth, vocab, config.max_seq_len).weights

    def model(
        self,
        config: Config,
        options: Mapping[str, Any],
        saved: ManifestRecord | None,
        resumed: Values,
    ) -> FieldValues:
        own = {name: getattr(config, name) for name in ("max_seq_len", "optimizer", *OF_WEIGHTS)}
        try:
            return {**own, "vocab": validation.vocab(config, saved, resumed)}
        except (OSError, UserError, ValueError):  # reported by check()
            return own

    def decide(self, request: PlanRequest, machine: Situation) -> Decided:
        from training.tasks.gpt import planning  # not needed to check a request

        return planning.decide(request, machine)

    def step(self, load: Mapping[str, Any]) -> StepNeeds:
        from training.tasks.gpt.memory import StepWorkload
        from training.tasks.gpt.step import GptStep

        return GptStep(StepWorkload(**load))

    def savings(self, plan: Plan) -> FieldValues:
        from training.tasks.gpt import memory_fit
        from training.tasks.gpt.memory import StepWorkload

        load = plan.get("memory", {}).get("load")
        return memory_fit.lightest(StepWorkload(**load)) if load else {}

    def memory_text(self, plan: Plan | TaskFields) -> list[str]:
        from training.tasks.gpt import planning

        return planning.memory_text(plan)

    def memory_notes(self, plan: Plan) -> list[str]:
        from training.tasks.gpt import planning
        from training.tasks.gpt.memory import StepWorkload

        load, room = StepWorkload(**plan["memory"]["load"]), plan["memory"]["free_bytes"]
        return planning.larger(load, Config(**plan["config"]), plan["ranks"], room)

    def learning_rates(self, plan: Plan) -> dict[str, float]:
        config = plan["config"]
        rates = {n: config.get(n) for n in ("matrix_lr", "embedding_lr", "unembedding_lr")}
        if isinstance(rates["matrix_lr"], str):
            rates["matrix_lr"] = MATRIX_LR[config["optimizer"]]
        return {name: rate for name, rate in rates.items() if rate}

    def memory_fields(self, plan: Plan) -> FieldValues:
        from training.tasks.gpt import memory_fit
        from training.tasks.gpt.memory import StepWorkload

        return memory_fit.settings(StepWorkload(**plan["memory"]["load"]))

    def saved_model(self, saved: Mapping[str, Any]) -> FieldValues:
        return {**asdict(of_checkpoint(saved)), "optimizer": saved["optimizer"]}

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
        together = plan["blocks_per_graph"]["value"] if "blocks_per_graph" in plan else None
        return LanguageModel(
            *(Config(**plan["config"]), device, data, savings), fp8=fp8, blocks_per_graph=together
        )

    def trained(
        self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> TrainedGpt:
        from training.tasks.gpt.trained import TrainedGpt

        return TrainedGpt(weights, state, device)

    def fields_of(self, weights: Weights) -> FieldValues:
        shape, words = of_checkpoint(weights.facts), _tokenizer(weights)
        found: FieldValues = {name: getattr(shape, name) for name in (*OF_WEIGHTS, "max_seq_len")}
        return found | ({"tokenizer": words} if words else {})

    def differences(
        self,
        weights: Weights,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
    ) -> list[Problem]:
        """The context may differ: rotary positions have no weights."""
        shape, words = of_checkpoint(weights.facts), _tokenizer(weights)
        out = [
            self.differs(weights, name, theirs, value, origins[name])
            for name in OF_WEIGHTS
            if (value := getattr(config, name)) != (theirs := getattr(shape, name))
        ]
        if words is None:
            out.append(
                Problem(
                    "tokenizer.lost",
                    msg(
                        "tasks.gpt.trained.no_tokenizer",
                        folders=", ".join(map(str, weights.folders)),
                    ),
                    msg("tasks.gpt.trained.tokenizer_wanted"),
                )
            )
        elif not _same_tokenizer(config.tokenizer, words):
            origin = origins["tokenizer"]
            out.append(self.differs(weights, "tokenizer", words, config.tokenizer, origin))
        return out

    def sizes_in(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        return sizes_in(shapes)

    def unfit(
        self,
        weights: Weights,
        shapes: Mapping[str, Sequence[int]],
        config: Config,
        origins: Mapping[str, str],
    ) -> list[Problem]:
        found = sizes_in(shapes)
        if not found:
            return []
        out = []
        if found["depth"] != config.depth:
            theirs = found["depth"]
            out.append(self.differs(weights, "depth", theirs, config.depth, origins["depth"]))
        known = config.tokenizer != tokenizer_base.BPE  # else the text determines its size
        if known and not tokenizer.check(config.tokenizer):
            rows = vocab_of(config.tokenizer, config.vocab_size)
            if found[ROWS] != rows:
                what = msg(
                    "tasks.gpt.rows_differ",
                    tokenizer=config.tokenizer,
                    origin=origins["tokenizer"],
                    rows=rows,
                    theirs=found[ROWS],
                    title=weights.title,
                )
                allowed = msg("tasks.gpt.trained.tokenizer_wanted")
                out.append(Problem("init.differs", what, allowed, field="tokenizer"))
        return out

    def aim(self, plan: Plan, given: Mapping[str, str]) -> tuple[Plan, list[Problem]]:
        if "data" not in given:
            missing = msg("tasks.gpt.evaluation.no_data")
            fixes = [f"--data={corpus.STDLIB}"]
            return plan, [Problem("flag.no_value", missing, corpus.NAMED, fixes, "data")]
        name = given.get("encoding", "")
        encoding_wrong = text_encoding.check(name, "--encoding") if name else []
        name = "" if encoding_wrong else name
        source, wrong = corpus.find(given["data"], "--data", name)
        lacks = optional_deps.missing(source.files, "") if source else []
        problems = [*encoding_wrong, *([wrong] if wrong else []), *lacks]
        return {**plan, "config": {**plan["config"], **given}}, problems

    def model_name(self, config: Mapping[str, Any]) -> str:
        return msg("tasks.gpt.model.name", depth=config["depth"])
