"""A trained restoration network, applied to frames of any number and size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from training.core.errors import Problem, UserError
from training.data.frames.pictures import Unreadable
from training.host import cgroups
from training.tasks.trained import FrameModel, Pieces, Progress, silent
from training.tasks.video_restoration import inference, network
from training.tasks.video_restoration.folders import OVERLAP

if TYPE_CHECKING:
    import numpy.typing as npt

    from training.tasks.evaluation import Part

WINDOW, SHARED = 24, 6  # frames per piece and shared by two, where the training sets none
# share of the free memory that a piece may need, and as much for the restored frames of two
MEMORY = 0.4
LEAST = 64  # side of the smallest tile chosen, pixels
CONTEXT = 8  # the overlap of two tiles is at least a fraction 1 / CONTEXT of their side


class VideoModel(FrameModel):
    def evaluate(
        self, progress: Progress = silent, parts: list[Part] | None = None
    ) -> dict[str, float]:
        try:
            return super().evaluate(progress, parts)
        except Unreadable as error:
            raise UserError(Problem("video.frame_unreadable", str(error))) from None

    @property
    def scale(self) -> int:
        return self.network.scale

    @property
    def network(self) -> network.Recurrent:
        assert isinstance(self.model, network.Recurrent)
        return self.model

    def pieces(
        self, size: tuple[int, int], count: int | None, window: int | None, tile: int | None
    ) -> Pieces:
        options = self.task.options if self.task else None
        frames, shared = WINDOW, SHARED
        if window is not None:
            frames, shared = window, min(SHARED, window // 2)
        elif options and options.num_frame_testing:  # as in validation
            frames, shared = options.num_frame_testing, options.num_frame_overlapping
        if window is None:
            pixel = 2 * 3 * 4 * self.scale**2 + 2 * 3  # bytes: fp32 results, and inputs
            most = int(cgroups.available_memory() * MEMORY / (size[0] * size[1] * pixel))
            frames = min(frames, max(2, most))
            shared = min(shared, frames // 2)
        held = min(frames, count or frames)
        if tile is None:
            fits = int((self._free() * MEMORY / self.network.step_bytes(held)) ** 0.5)
            pixels = size[0] * size[1]
            tile = 0 if fits**2 >= pixels else max(LEAST, fits // 8 * 8)
        tile = tile if tile < max(size) else 0
        # not more than can have any effect
        overlap = min(max(OVERLAP, tile // CONTEXT), 2 * self.network.reach(held))
        return Pieces(frames, shared, tile, min(overlap, tile // 2) if tile else 0)

    def _free(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return cgroups.available_memory()

    def restore(
        self, frames: Iterable[npt.NDArray[Any]], pieces: Pieces
    ) -> Iterator[npt.NDArray[Any]]:
        def piece(part: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(part.to(self.device).float().div_(255))
            return found.float().cpu()

        tensors = (torch.tensor(each).permute(2, 0, 1)[None] for each in frames)
        found = inference.streamed(
            piece,
            tensors,
            scale=self.scale,
            steps=pieces.window,
            overlap=pieces.shared,
            side=pieces.tile,
            shared=pieces.overlap,
        )
        for frame in found:
            rounded = frame[0].clamp(0, 1).mul(255).round().byte()
            yield rounded.permute(1, 2, 0).contiguous().numpy()
