"""What can be trained: gpt, video_restoration, or a task of the user's own in one file. No torch here: a plan is made with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.loader import ConfigFile
from training.config.schema import FIELDS, VIDEO, Config, Known, shared
from training.core.errors import Problem
from training.host import packages
from training.tasks import custom

if TYPE_CHECKING:
    import torch

    from training.core.contracts.plan import Plan, TaskRecord
    from training.data.prepare import PreparedCorpus
    from training.tasks.base import Task

GPT = str(FIELDS["task"].default)


def _is_option_file(text: str) -> bool:
    from training.tasks.video_restoration.kair import loader  # only for a .json

    return loader.is_option_file(text)


def _option_file(path: Path, text: str, ranks: int) -> ConfigFile:
    from training.tasks.video_restoration.kair import loader

    return loader.load(path, text, ranks)


# What else than a config of ours may stand where a config belongs: (is a text one, its reader).
CONFIG_READERS = ((_is_option_file, _option_file),)


@dataclass(frozen=True)
class TaskSpec:
    """A task as a plan sees it. `own`: its options beside the fields that every training has, as fields of the same make."""

    name: str
    own: Known
    file: Path | None = None  # of a user's own task

    @property
    def unit(self) -> str:
        """What its batches and speed count."""
        return "tokens" if self.name == GPT else "samples"

    @property
    def fields(self) -> Known:
        """Every field that a command line or a config may set."""
        return FIELDS if self.name == GPT else {n: f for n, f in FIELDS.items() if shared(n)} | dict(self.own)

    def record(self, options: Mapping[str, Any]) -> TaskRecord:
        """For the plan."""
        return {"name": self.name, "unit": self.unit, "file": str(self.file) if self.file else None, "options": dict(options)}


def find(name: str, origin: str) -> tuple[TaskSpec, list[Problem]]:
    """The task of this name; with problems it is gpt."""
    if name == GPT:
        return TaskSpec(GPT, {}), []
    if name == VIDEO:
        from training.tasks.video_restoration.options import VideoOptions

        return TaskSpec(VIDEO, {f.name: f for f in fields(VideoOptions)}), []
    file = Path(os.path.expanduser(name))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    found, problems = custom.read(file, origin)
    own_name = file.name if file.stem in (GPT, VIDEO) else file.stem
    return (TaskSpec(GPT, {}), problems) if problems else (TaskSpec(own_name, found, file.absolute()), [])


def everything() -> Known:
    """The fields of all tasks that are built in: enough to see which one is meant."""
    return dict(FIELDS) | dict(find(VIDEO, "")[0].own)


def task_of(plan: Plan) -> TaskRecord:
    """A plan's task; one that was made before there were several is a GPT's."""
    return plan.get("task") or TaskSpec(GPT, {}).record({})


def check(kind: TaskSpec, options: Mapping[str, Any], origins: Mapping[str, str], installed: bool) -> list[Problem]:
    """What is wrong with a task's own options and the data that they name; quick. `installed`: this interpreter has the packages."""
    if kind.name != VIDEO:
        return []
    from training.tasks.video_restoration import folders
    from training.tasks.video_restoration.options import VideoOptions

    lacks = packages.lacking(["pillow"]) if installed else []
    problems = (
        [Problem("package.missing", f"task {VIDEO} needs pillow, which is not installed", "", [packages.install(lacks)])] if lacks else []
    )
    return problems + folders.check(VideoOptions(**options), origins, pictures=installed and not lacks)


def sentences(kind: TaskSpec, options: Mapping[str, Any]) -> list[str]:
    """What the plan says of the data that a task's options name; after check()."""
    if kind.name != VIDEO:
        return []
    from training.tasks.video_restoration import folders
    from training.tasks.video_restoration.options import VideoOptions

    return [folders.sentence(VideoOptions(**options))]


def make(plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
    """The planned task on this rank, with torch. `data`: of a task that reads text."""
    config, task = Config(**plan["config"]), task_of(plan)
    if data is not None:
        from training.tasks.gpt.model import MemorySavings
        from training.tasks.gpt.task import LanguageModel

        return LanguageModel(config, device, data, MemorySavings(plan["activation_checkpointing"]["value"], plan["loss_chunks"]["value"]))
    if task["name"] == VIDEO:
        from training.tasks.video_restoration.options import VideoOptions
        from training.tasks.video_restoration.task import VideoRestoration

        return VideoRestoration(VideoOptions(**task["options"]), config, device)
    assert task["file"], "a task without a module here is a user's own file"
    return custom.load(Path(task["file"]), task["options"], config, device)


def reads_text(plan: Plan) -> bool:
    """Is there text to be prepared before the ranks train?"""
    return bool(task_of(plan)["name"] == GPT)
