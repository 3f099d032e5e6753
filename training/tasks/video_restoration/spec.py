"""Spec of the task video_restoration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.config.loader import ConfigFile
from training.config.schema import Config
from training.core import find_run
from training.core.errors import Problem
from training.core.messages import msg
from training.core.phases import EVALUATIONS
from training.data.corpus import CorpusSource
from training.host import packages
from training.tasks.sample_spec import SampleSpec
from training.tasks.video_restoration.options import VideoOptions

if TYPE_CHECKING:
    import torch

    from training.core.contracts.plan import Plan
    from training.data.prepared_corpus import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.trained import Trained
    from training.tasks.weights import Weights


FLAG = "--test_dataroot_gt="


def _by_data(fixes: Iterable[str]) -> list[str]:
    """Advice of a training as `./duet evaluate` accepts it."""
    found = [f"--data={fix.removeprefix(FLAG)}" if fix.startswith(FLAG) else fix for fix in fixes]
    return [fix for fix in found if not fix.startswith("--test_")]


@dataclass(frozen=True)
class VideoSpec(SampleSpec):
    """Frames in, frames out. Also accepts KAIR's option files as configs."""

    validation_workers: ClassVar[bool] = False
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("dataroot_gt", "dataroot_lq", "dataroot_spike", "meta_info_file"),
            *("test_dataroot_gt", "test_dataroot_lq", "test_dataroot_spike", "test_num_frame"),
            *("num_frame_testing", "num_frame_overlapping", "size_patch_testing"),
        }
    )

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
        video = VideoOptions(**options)
        problems += folders.needs_lmdb(video) if installed else []
        ready = installed and not problems
        return None, problems + folders.check(video, origins, headers_too=ready)

    def of_data(self, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        from training.tasks.video_restoration import clip_text

        return clip_text.lines_and_notes(VideoOptions(**options))

    def located(self, options: Mapping[str, Any], plan: Plan) -> Mapping[str, Any]:
        paths = {name for name, field in self.own.items() if field.metadata["unit"] == "path"}
        return {
            name: find_run.as_started(value, plan) if name in paths else value
            for name, value in options.items()
        }

    def read_config(self, path: Path, text: str, ranks: int) -> ConfigFile | None:
        from training.tasks.video_restoration.kair import loader

        return loader.load(path, text, ranks) if loader.is_option_file(text) else None

    def login_key(self, path: Path) -> str | None:
        from training.tasks.video_restoration.kair import loader

        return loader.api_key(path)

    def aim(self, plan: Plan, given: Mapping[str, str]) -> tuple[Plan, list[Problem]]:
        """`data`: sharp frames with the blurred ones beside them, in the GoPro layout."""
        from training.tasks.video_restoration import folders
        from training.tasks.video_restoration.listing import Scan

        if others := given.keys() - {"data"}:
            return plan, [
                Problem("flag.unknown", msg("tasks.video.no_text", flags=", ".join(others)))
            ]
        options = dict(plan["task"]["options"])
        origins = dict.fromkeys(options, msg("tasks.video.of_the_run"))
        if "data" in given:
            options |= {"test_dataroot_gt": given["data"], "test_dataroot_lq": ""}
            origins["test_dataroot_gt"] = "--data"
        else:
            options = dict(self.located(options, plan))
        if not options.get("test_dataroot_gt"):
            return plan, [Problem("video.no_data", msg("tasks.video.no_evaluation"))]
        video = VideoOptions(**options)
        problems = Scan(video, "val", origins).problems or folders.needs_lmdb(video, ["val"])
        problems = problems or folders.damage(video, "val", origins)
        for problem in problems:
            problem.fixes[:] = _by_data(problem.fixes)
        return {**plan, "task": {**plan["task"], "options": options}}, problems

    def restores(self, weights: Weights) -> list[Problem]:
        if not weights.plan["task"]["options"].get("dataroot_spike"):
            return []
        what = msg("tasks.video.needs_spikes", name=weights.name)
        return [Problem("task.unsupported", what, msg("tasks.video.without_spikes"))]

    def lighter_in(self, phase: str) -> str | None:
        lighter = msg("tasks.video.lighter_evaluation")
        return lighter if phase in EVALUATIONS else super().lighter_in(phase)

    def trained(
        self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> Trained:
        from training.tasks.video_restoration.trained import VideoModel

        task = self.make(weights.plan, device, None)
        model = task.model()
        model.load_state_dict(state)
        return VideoModel(weights, model, device, task)

    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        from training.tasks.video_restoration.task import VideoRestoration

        return VideoRestoration(
            VideoOptions(**plan["task"]["options"]), Config(**plan["config"]), device
        )
