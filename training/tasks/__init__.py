"""What can be trained: the tasks that are built in, and a user's own in one file. The rest of the
house asks a task's spec, whichever it is. No torch here: a plan is made with it."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.schema import FIELDS, Known
from training.core.errors import Problem
from training.tasks import custom
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
    from training.data.prepare import PreparedCorpus
    from training.tasks.base import Task

# The registry: a task of the product stands here and nowhere else outside its own folder.
BUILT_IN: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (GptSpec(GPT), VideoSpec(VIDEO, {f.name: f for f in fields(VideoOptions)}))
}
DEFAULT = BUILT_IN[str(FIELDS["task"].default)]
# What else than a config of ours may stand where a config belongs: (is a text one, its reader).
CONFIG_READERS = tuple((spec.reads_config, spec.load_config) for spec in BUILT_IN.values())


def find(name: str, origin: str) -> tuple[TaskSpec, list[Problem]]:
    """The task of this name or file; with problems it is the default one."""
    if name in BUILT_IN:
        return BUILT_IN[name], []
    file = Path(os.path.expanduser(name))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    found, problems = custom.read(file, origin, list(BUILT_IN))
    # A file that is called like a built-in one has a problem, but for its suffix.
    own_name = file.name if file.stem in BUILT_IN else file.stem
    return (
        (DEFAULT, problems)
        if problems
        else (custom.CustomSpec(own_name, found, file.absolute()), [])
    )


def everything() -> Known:
    """The fields of all tasks that are built in: enough to see which one is meant."""
    return {name: f for spec in BUILT_IN.values() for name, f in spec.fields.items()}


def task_of(plan: Plan) -> TaskRecord:
    """A plan's task; one that was made before there were several is of the default one."""
    return plan.get("task") or DEFAULT.record({})


def spec_of(plan: Plan) -> TaskSpec:
    """A plan's task, without the fields of a user's own: its file may be another one by now."""
    task = task_of(plan)
    name, file = str(task["name"]), task.get("file")
    return (
        BUILT_IN[name]
        if name in BUILT_IN
        else custom.CustomSpec(name, file=Path(file) if file else None)
    )


def step_of(plan: Plan, sequences: int | None = None) -> StepNeeds | None:
    """The planned step, or the same with another micro-batch; None where the plan does not know its
    memory."""
    load = plan.get("memory", {}).get("load")
    if not load:
        return None
    step = spec_of(plan).step(load)
    return step.resized(sequences) if sequences else step


def login_key(file: Path | None) -> str | None:
    """The key for W&B in a config file of another vocabulary. Never write it anywhere."""
    return next((key for spec in BUILT_IN.values() if file and (key := spec.login_key(file))), None)


def make(plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
    """The planned task on this rank, with torch. `data`: of a task that reads text."""
    return spec_of(plan).make(plan, device, data)
