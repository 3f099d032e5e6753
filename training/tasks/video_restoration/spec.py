"""Spec of the task video_restoration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.loader import ConfigFile
from training.config.schema import Config
from training.core.errors import Problem
from training.core.messages import msg
from training.data.corpus import CorpusSource
from training.host import packages
from training.tasks.sample_spec import SampleSpec
from training.tasks.video_restoration.options import VideoOptions

if TYPE_CHECKING:
    import torch

    from training.core.contracts.plan import Plan
    from training.data.prepare import PreparedCorpus
    from training.tasks.base import Task


@dataclass(frozen=True)
class VideoSpec(SampleSpec):
    """Frames in, frames out. Also accepts KAIR's option files as configs."""

    def check(
        self,
        config: Config,
        options: Mapping[str, Any],
        origins: Mapping[str, str],
        *,
        installed: bool,
        whole: bool,
    ) -> tuple[CorpusSource | None, list[Problem]]:
        from training.tasks.video_restoration import folders

        if not whole:
            return None, []
        lacks = packages.lacking(["pillow"]) if installed else []
        problems = (
            [
                Problem(
                    "package.missing",
                    msg("tasks.video.needs_pillow", name=self.name),
                    "",
                    [packages.install(lacks)],
                )
            ]
            if lacks
            else []
        )
        return None, problems + folders.check(
            VideoOptions(**options), origins, pictures=installed and not lacks
        )

    def sentences(self, options: Mapping[str, Any]) -> list[str]:
        from training.tasks.video_restoration import folders

        return [folders.sentence(VideoOptions(**options))]

    def read_config(self, path: Path, text: str, ranks: int) -> ConfigFile | None:
        from training.tasks.video_restoration.kair import loader

        return loader.load(path, text, ranks) if loader.is_option_file(text) else None

    def login_key(self, path: Path) -> str | None:
        from training.tasks.video_restoration.kair import loader

        return loader.api_key(path)

    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        from training.tasks.video_restoration.task import VideoRestoration

        return VideoRestoration(
            VideoOptions(**plan["task"]["options"]), Config(**plan["config"]), device
        )
