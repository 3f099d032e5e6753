"""Video restoration task."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.tasks.base import Task
from training.tasks.evaluation import Part
from training.tasks.video_restoration import (
    clip_pictures,
    comparison_image,
    dataset,
    folders,
    inference,
    listing,
    lists,
    metrics,
    network,
    schedule,
)

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord


class VideoRestoration(Task):
    """`options`: see options.py. A batch: {"lq": (B, T, C, h, w), "gt": (B, T, 3, H, W)}."""

    random = False
    eval_batch = 1  # clips differ in length and size

    @property
    def channels(self) -> int:
        """Input channels: the picture and its spikes."""
        return 3 + (self.options.spike_channels if self.options.dataroot_spike else 0)

    @property
    def scale(self) -> int:
        return int(self.options.scale)

    def model(self) -> nn.Module:
        return network.Recurrent(
            self.channels, self.options.embed_dim, self.options.num_blocks, self.scale
        )

    def compile(self, model: nn.Module) -> None:
        """Compile only the steps: the loop over frames would be recompiled for every clip
        length."""
        assert isinstance(model, network.Recurrent)
        model.backward_way.compile()
        model.forward_way.compile()

    def train_data(self) -> dataset.Training:
        return dataset.Training(self.options)

    def val_data(self) -> dataset.Validation | None:
        return dataset.Validation(self.options) if self.options.test_dataroot_gt else None

    def measured(self, count: int) -> dict[str, int]:
        return super().measured(count) | {"frames": self.options.test_num_frame}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        options = self.options
        return options.G_lossfn_weight * metrics.loss(
            options.G_lossfn_type, model(batch["lq"]), batch["gt"], options.G_charbonnier_eps
        )

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        found, given = self.restored(model, batch["lq"]), network.enlarged(batch["lq"], self.scale)
        wanted = batch["gt"]
        return {
            "psnr": metrics.psnr(found, wanted),
            "ssim": metrics.ssim(found, wanted),
            "psnr_input": metrics.psnr(given, wanted),
        }

    @cached_property
    def _names(self) -> list[str]:
        return [clip.name for clip in folders.clips(self.options, "val")]

    def part(self, model: nn.Module, index: int, batch: Any, pictured: bool) -> Part:
        def restore(frames: torch.Tensor) -> torch.Tensor:
            return self.restored(model, frames)

        found = (
            clip_pictures.pictures(restore, batch["lq"], batch["gt"], self.scale)
            if pictured
            else []
        )
        return Part(self._names[index], pictures=found)

    def shown(self, scores: Mapping[str, float]) -> str:
        gain = scores["psnr"] - scores["psnr_input"]
        return (
            f"PSNR {scores['psnr']:.2f} dB ({gain:+.2f} over the input), SSIM {scores['ssim']:.4f}"
        )

    def restored(self, model: nn.Module, frames: torch.Tensor) -> torch.Tensor:
        """The clip restored whole, or in pieces as set by num_frame_testing and
        size_patch_testing."""

        def piece(part: torch.Tensor) -> torch.Tensor:
            self.alive()
            found: torch.Tensor = model(part)
            return found

        options = self.options
        steps, overlap, side = (
            options.num_frame_testing,
            options.num_frame_overlapping,
            options.size_patch_testing,
        )
        return inference.restored(
            piece, frames, scale=self.scale, steps=steps, overlap=overlap, side=side
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        options = self.options
        first, second = lists.numbers(options.G_optimizer_betas)
        kind = torch.optim.AdamW if options.G_optimizer_type == "adamw" else torch.optim.Adam
        return kind(
            model.parameters(),
            lr=options.G_optimizer_lr,
            betas=(first, second),
            weight_decay=options.G_optimizer_wd,
        )

    def rate(self, step: int, total: int) -> float:
        return schedule.share(self.options, step, total)

    def sample(self, model: nn.Module, folder: Path) -> str | None:
        data = self.val_data()
        return (
            None
            if data is None
            else comparison_image.write(
                lambda frames: self.restored(model, frames), data, self.scale, self.device, folder
            )
        )

    def facts(self) -> ManifestRecord:
        """The network's shape, and a digest of the clips of each part. Raises UserError,
        OSError."""
        shape = {
            "scale": self.scale,
            "embed_dim": self.options.embed_dim,
            "num_blocks": self.options.num_blocks,
            "channels": self.channels,
        }
        return {"shape": shape, "data": {part: self._content(part) for part in listing.PARTS}}

    def same_data(self, saved: ManifestRecord) -> bool:
        if isinstance(saved["data"], str):  # of early 0.1: of all parts
            return bool(saved["data"] == folders.content(self.options))
        return bool(saved["data"]["train"] == self._content("train"))

    def _content(self, part: str) -> str:
        """The digest of a part, for which the names and sizes of all files are read once."""
        if part not in self._contents:
            self._contents[part] = folders.content(self.options, part)
        return self._contents[part]

    @cached_property
    def _contents(self) -> dict[str, str]:
        return {}

    def flops(self, model: nn.Module) -> float | None:
        """Operations per sample: every weight of every convolution is used at every pixel of every
        input frame."""
        side = self.options.gt_size // self.scale
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        return 6.0 * weights * side**2 * self.options.num_frame if side else None
