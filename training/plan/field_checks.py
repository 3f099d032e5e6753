"""Values of fields that contradict each other or the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from training.config.origin import DEFAULT
from training.config.schema import FIELDS, Config
from training.core.errors import Problem
from training.core.messages import msg
from training.tasks.spec import TaskSpec

GPU_ONLY = ("fp16", "fp8")


def problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Contradictions with any task."""
    return [*_without_gpu(config, origins), *_nothing_to_compare(config, origins)]


def of_task(
    kind: TaskSpec, config: Config, origins: Mapping[str, str], ranks: int
) -> list[Problem]:
    """`ranks`: of the run; 0: unknown."""
    return [
        *_not_computable(kind, config, origins),
        *_smaller_limit(kind, config, origins, ranks),
    ]


def _not_computable(kind: TaskSpec, config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A precision that the task's model does not have."""
    if config.precision != "fp8" or kind.fp8:
        return []
    text = msg("plan.precision.task", origin=origins["precision"], task=kind.name)
    others = [value for value in FIELDS["precision"].metadata["choices"] if value != "fp8"]
    return [
        Problem("config.task_precision", text, ", ".join(others), ["--precision=auto"], "precision")
    ]


def _without_gpu(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A precision of GPUs with --device=cpu. Where no GPU is found, the preflight refuses it."""
    if config.device != "cpu" or config.precision not in GPU_ONLY:
        return []
    text = msg(
        "plan.precision.cpu_asked",
        precision=config.precision,
        origin=origins["precision"],
        device=origins["device"],
    )
    fixes = ["--precision=auto", "--device=cuda"]
    return [Problem("flag.contradiction", text, "auto, bf16, fp32", fixes, "precision")]


def _nothing_to_compare(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """--keep_best without evaluations."""
    if not config.keep_best or config.eval_every:
        return []
    text = msg(
        "plan.keep_best.never", keep_best=origins["keep_best"], eval_every=origins["eval_every"]
    )
    default = FIELDS["eval_every"].default
    fixes = [f"--eval_every={default}", "--keep_best=false"]
    return [Problem("flag.contradiction", text, msg("plan.keep_best.wanted"), fixes, "keep_best")]


def _smaller_limit(
    kind: TaskSpec, config: Config, origins: Mapping[str, str], ranks: int
) -> list[Problem]:
    """--max_total_batch_size below the batch itself."""
    total, most = config.total_batch_size, config.max_total_batch_size
    if kind.total_follows and origins["total_batch_size"] == DEFAULT:
        return []  # it depends on a micro-batch that is not decided yet
    if not most or most >= total:
        return []
    text = msg(
        "plan.larger_batch.limit",
        most=most,
        most_origin=origins["max_total_batch_size"],
        total=total,
        origin=origins["total_batch_size"],
    )
    allowed = msg("plan.larger_batch.allowed", total=total)
    fixes = [f"--max_total_batch_size={2 * total}"]
    if ranks and not kind.divides(replace(config, total_batch_size=most), origins, ranks):
        fixes.append(f"--total_batch_size={most}")
    return [Problem("flag.contradiction", text, allowed, fixes, "max_total_batch_size")]
