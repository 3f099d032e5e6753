"""Registry of the built-in tasks and of a user's task file. Other packages use only a task's spec.
No torch: planning imports this module."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.schema import FIELDS, Known
from training.core.errors import Problem
from training.core.find_run import EXPERIMENTS, LATEST, RunSelector
from training.core.project import WORK
from training.tasks import custom, weights
from training.tasks.gpt.spec import NAME as GPT
from training.tasks.gpt.spec import GptSpec
from training.tasks.memory import StepNeeds
from training.tasks.spec import TaskSpec
from training.tasks.video_restoration.options import NAME as VIDEO
from training.tasks.video_restoration.options import VideoOptions
from training.tasks.video_restoration.spec import VideoSpec

if TYPE_CHECKING:
    import torch

    from training.core.contracts.plan import Plan, TaskRecord
    from training.data.prepared_corpus import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.trained import Trained

# A built-in task is named only here and in its own folder.
BUILT_IN: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (GptSpec(GPT), VideoSpec(VIDEO, {f.name: f for f in fields(VideoOptions)}))
}
DEFAULT = BUILT_IN[str(FIELDS["task"].default)]
# Readers of config files in other formats than Duet's own.
CONFIG_READERS = tuple(spec.read_config for spec in BUILT_IN.values())


def find(name: str, origin: str) -> tuple[TaskSpec, list[Problem]]:
    """The spec of this task name or file; with problems, the default task's."""
    if name in BUILT_IN:
        return BUILT_IN[name], []
    file = Path(os.path.expanduser(name))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    found, problems = custom.read(file, origin, list(BUILT_IN))
    # custom.read rejects a file with the name of a built-in task; the suffix separates the names.
    own_name = file.name if file.stem in BUILT_IN else file.stem
    return (
        (DEFAULT, problems)
        if problems
        else (custom.CustomSpec(own_name, found, file.absolute()), [])
    )


def everything() -> Known:
    """The fields of all built-in tasks, enough to find out which one is meant."""
    return {name: f for spec in BUILT_IN.values() for name, f in spec.fields.items()}


def task_of(plan: Plan) -> TaskRecord:
    """The task of a plan; plans from before there were several tasks have the default one."""
    return plan.get("task") or DEFAULT.record({})


def spec_of(plan: Plan) -> TaskSpec:
    """The spec of a plan's task, without options of a user's file, which may have changed."""
    task = task_of(plan)
    name, file = str(task["name"]), task.get("file")
    return (
        BUILT_IN[name]
        if name in BUILT_IN
        else custom.CustomSpec(name, file=Path(file) if file else None)
    )


def step_of(plan: Plan, sequences: int | None = None, ranks: int | None = None) -> StepNeeds | None:
    """The planned step, or the same step with another micro-batch on as many or on `ranks` ranks;
    None if the plan has no memory estimate."""
    load = plan.get("memory", {}).get("load")
    if not load:
        return None
    step = spec_of(plan).step(load)
    return step.resized(sequences, ranks) if sequences else step


def login_key(file: Path | None) -> str | None:
    """The W&B key in a config file of another format. Never write it anywhere."""
    return next((key for spec in BUILT_IN.values() if file and (key := spec.login_key(file))), None)


def load_model(
    source: str | Path = LATEST, device: str = "cpu", kind: str | None = None
) -> Trained:
    """A trained model for your own Python: `.model` is the module in eval mode; a language model
    also has `.generate(prompt)` and `.tokenizer`. `source`: a run or its name, a checkpoint, an
    exported folder, or latest; `device`: cpu, cuda or auto; `kind`: ema or raw, None: the moving
    average if there is one. Raises UserError."""
    from training.tasks import trained

    word = None if source == LATEST else str(source)
    found = weights.find(word, WORK / EXPERIMENTS, RunSelector("source", "", LATEST), kind)
    return trained.load(spec_of(found.plan), found, device)


def make(plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
    """The planned task on this rank, with torch. `data`: for tasks that read text."""
    return spec_of(plan).make(plan, device, data)
