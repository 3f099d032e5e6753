"""Samples of paired clips as tensors: crops of a few frames for training, whole clips for
validation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from training.core.messages import msg
from training.data.frames import pictures
from training.data.frames.pictures import Unreadable
from training.tasks.video_restoration import folders
from training.tasks.video_restoration.listing import Clip

Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels
Planes = npt.NDArray[Any]
Sample = dict[str, torch.Tensor]  # lq (T, C, h, w) and gt (T, 3, H, W), float32, 0 … 1


class Frames:
    """Reader of clip frames. `options`: the task's."""

    def __init__(self, options: Any, part: str) -> None:
        self.clips, self.options, self.scale = (
            folders.clips(options, part),
            options,
            int(options.scale),
        )
        self._sizes: dict[str, tuple[int, int]] = {}

    def read(
        self, clip: Clip, frames: list[int], box: Box | None
    ) -> tuple[Planes, Planes, Planes | None]:
        """(gt, lq, spikes) of some frames: uint8 (T, H, W, 3), (T, h, w, 3), float32 (T, h, w, C)
        or None. `box`: in lq's pixels."""
        small = large = cut = None
        if box is not None:  # whose place fits this size only
            width, height = small = self.size(clip)
            large = width * self.scale, height * self.scale
            cut = tuple(side * self.scale for side in box)
        gt = _stacked(
            [pictures.pixels(clip.gt[i], cut, size=large) for i in frames], clip.gt, frames
        )
        lq = _stacked(
            [pictures.pixels(clip.lq[i], box, size=small) for i in frames], clip.lq, frames
        )
        if gt.shape[1:3] != (lq.shape[1] * self.scale, lq.shape[2] * self.scale):
            raise Unreadable(
                msg(
                    "tasks.video.frame.size_mismatch",
                    gt=clip.gt[frames[0]],
                    gt_size=_pixels(gt),
                    lq=clip.lq[frames[0]],
                    lq_size=_pixels(lq),
                    scale=self.scale,
                )
            )
        if not clip.spike:
            return gt, lq, None
        size = self.size(clip)
        return gt, lq, np.stack([self._spikes(clip.spike[i], size, box) for i in frames])

    def size(self, clip: Clip) -> tuple[int, int]:
        """(width, height) of a blurred frame, from the header of the first."""
        if clip.name not in self._sizes:
            self._sizes[clip.name] = pictures.size(clip.lq[0])
        return self._sizes[clip.name]

    def _spikes(self, file: str, size: tuple[int, int], box: Box | None) -> Planes:
        """Spike planes of one frame, (h, w, C) float32, as large as the frame."""
        planes, channels = _planes(file, self.options), self.options.spike_channels
        if len(planes) < channels:
            raise Unreadable(
                msg(
                    "tasks.video.frame.few_planes", file=file, planes=len(planes), channels=channels
                )
            )
        edges = np.linspace(0, len(planes), channels + 1).astype(int)
        bins = [planes[a:b].mean(axis=0, dtype=np.float32) for a, b in pairwise(edges)]
        return np.stack([_resized(each, size, box) for each in bins], axis=-1)


class Training(Dataset[Sample]):
    """Every frame of every clip starts a sample, as in KAIR; a start too close to the end is
    replaced by a random one."""

    def __init__(self, options: Any) -> None:
        self.options, self.frames = options, Frames(options, "train")
        self.intervals = folders.intervals(options)
        self.ends = np.cumsum([len(clip.gt) for clip in self.frames.clips])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Sample:
        return self.draw(index, np.random.default_rng(index))

    def draw(self, index: int, random: np.random.Generator) -> Sample:
        """A sample whose frames, crop and flips depend only on `random`. Raises Unreadable."""
        options, number = self.options, int(np.searchsorted(self.ends, index, side="right"))
        clip = self.frames.clips[number]
        start, step = (
            index - (int(self.ends[number - 1]) if number else 0),
            int(random.choice(self.intervals)),
        )
        last = len(clip.gt) - (options.num_frame - 1) * step  # the first start too close to the end
        other = int(random.integers(last))
        chosen = [(start if start < last else other) + i * step for i in range(options.num_frame)]
        place = random.random(2)
        reverse, mirror, over, turn = random.random(4) < 0.5
        if options.random_reverse and reverse:
            chosen.reverse()
        gt, lq, spikes = self.frames.read(clip, chosen, self._box(clip, place))
        # other frames keep their orientation, so that they fit into one batch
        square = lq.shape[1] == lq.shape[2]

        def turned(x: Planes) -> Planes:
            if options.use_hflip and mirror:
                x = x[:, :, ::-1]
            if options.use_rot and over:
                x = x[:, ::-1]
            return x.transpose(0, 2, 1, 3) if options.use_rot and turn and square else x

        return _sample(turned(gt), turned(lq), None if spikes is None else turned(spikes))

    def _box(self, clip: Clip, place: npt.NDArray[np.float64]) -> Box | None:
        side = self.options.gt_size // self.frames.scale
        if not side:
            return None
        width, height = self.frames.size(clip)
        if min(width, height) < side:
            raise Unreadable(
                msg(
                    "tasks.video.frame.smaller_than_crop",
                    file=clip.lq[0],
                    width=width,
                    height=height,
                    side=side,
                )
            )
        left, top = int(place[0] * (width - side + 1)), int(place[1] * (height - side + 1))
        return left, top, left + side, top + side


class Validation(Dataset[Sample]):
    """Whole clips, or their first test_num_frame frames. Clips differ in length and size: one per
    batch."""

    most_readers = 0  # a clip may have gigabytes, which shared memory may not hold

    def __init__(self, options: Any) -> None:
        self.frames, self.limit = Frames(options, "val"), options.test_num_frame

    def __len__(self) -> int:
        return len(self.frames.clips)

    def __getitem__(self, index: int) -> Sample:
        clip = self.frames.clips[index]
        count = len(clip.gt) if self.limit < 0 else min(self.limit, len(clip.gt))
        return self.part(index, 0, count)

    def part(self, index: int, first: int, count: int) -> Sample:
        """Some frames of a clip. Raises Unreadable."""
        return _sample(
            *self.frames.read(self.frames.clips[index], list(range(first, first + count)), None)
        )


def _stacked(pictures: list[Planes], files: tuple[str, ...], frames: list[int]) -> Planes:
    for frame, picture in zip(frames, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            raise Unreadable(
                msg("data.frames.other_size", file=files[frame], first=files[frames[0]])
            )
    return np.stack(pictures)


def _planes(file: str, options: Any) -> Planes:
    """(T, h, w) of a spike file: booleans if raw, 0 … 1 from a picture, an array's numbers
    unchanged."""
    try:
        suffix = Path(file).suffix.lower()
        if suffix == ".npy":
            found = np.load(file, allow_pickle=False)
            if found.ndim not in (2, 3) or found.dtype.kind not in "biuf":
                raise Unreadable(msg("tasks.video.header.no_array", file=file))
            return found[None] if found.ndim == 2 else found
        if suffix != ".dat":
            with pictures.opened(file) as picture:
                return np.asarray(picture.convert("L"), dtype=np.float32)[None] / 255
        height, width = options.spike_h, options.spike_w
        # Planes in order, each row by row; the first pixel is a byte's lowest bit (SpikeCV).
        bits = np.unpackbits(np.fromfile(file, dtype=np.uint8), bitorder="little")
        planes = bits[: len(bits) // (height * width) * height * width].reshape(-1, height, width)
        return planes[:, ::-1] if options.spike_flipud else planes
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise Unreadable(msg("data.frames.unreadable", file=file, error=error)) from None


def _resized(plane: Planes, size: tuple[int, int], box: Box | None) -> Planes:
    """A plane resized to the frame (width, height), and its part inside the box."""
    left, top, right, bottom = box or (0, 0, *size)
    if plane.shape == (size[1], size[0]):
        return plane[top:bottom, left:right]
    across, down = plane.shape[1] / size[0], plane.shape[0] / size[1]
    part = (left * across, top * down, right * across, bottom * down)
    return np.asarray(
        Image.fromarray(np.ascontiguousarray(plane)).resize(
            (right - left, bottom - top), Image.Resampling.BILINEAR, box=part
        )
    )


def _sample(gt: Planes, lq: Planes, spikes: Planes | None) -> Sample:
    seen = _tensor(lq).div_(255)
    if spikes is not None:
        seen = torch.cat([seen, _tensor(spikes)], 1)
    return {"lq": seen, "gt": _tensor(gt).div_(255)}


def _tensor(x: Planes) -> torch.Tensor:
    """(T, h, w, C) → (T, C, h, w) float32, a copy."""
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2), dtype=np.float32))


def _pixels(x: Planes) -> str:
    return f"{x.shape[2]} × {x.shape[1]}"
