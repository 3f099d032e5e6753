"""Small clips for tests of video restoration: rendered ones, and ones whose pixels encode their
position."""

from __future__ import annotations

import runpy
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.conftest import ROOT
from training.tasks.video_restoration.options import VideoOptions

EXAMPLE = ROOT / "examples/make_blur_video.py"
MAKER = runpy.run_path(str(EXAMPLE))  # its functions


def rendered(folder: Path, *flags: str) -> Path:
    """Six frames of 32 × 32 pixels; four training clips and one validation clip."""
    assert MAKER["main"]([str(folder), "--clips=4", "--frames=6", "--size=32", *flags]) == 0
    return folder


def gopro(folder: Path, **facts: Any) -> VideoOptions:
    return VideoOptions(
        dataroot_gt=f"{folder}/train",
        test_dataroot_gt=f"{folder}/test",
        **{"num_frame": 3, "gt_size": 16} | facts,
    )


def pixels(clip: int, frame: int, width: int = 16, height: int = 12) -> Any:
    """A picture whose pixels encode column, row, clip and frame."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x, y, np.full_like(x, 16 * clip + frame)], axis=-1).astype(np.uint8)


def write(
    folder: Path, clip: int, frames: int, *, width: int = 16, height: int = 12, first: int = 0
) -> Path:
    """A clip of such pictures."""
    folder.mkdir(parents=True)
    for frame in range(frames):
        Image.fromarray(pixels(clip, frame, width, height)).save(
            folder / f"{first + frame:06d}.png"
        )
    return folder


def pairs(folder: Path, lengths: tuple[int, ...] = (5, 7), **facts: Any) -> VideoOptions:
    """KAIR's layout: gt/CLIP and lq/CLIP; sharp pictures encode clip numbers 8 higher."""
    for number, frames in enumerate(lengths):
        write(folder / "gt" / f"c{number}", 8 + number, frames)
        write(folder / "lq" / f"c{number}", number, frames)
    return VideoOptions(
        dataroot_gt=f"{folder}/gt",
        dataroot_lq=f"{folder}/lq",
        **{"num_frame": 3, "gt_size": 8} | facts,
    )


def smeared(folder: Path, **facts: Any) -> VideoOptions:
    """The easiest blur to learn: every frame is smeared sideways by three pixels."""
    for part, count in (("train", 3), ("test", 1)):
        for clip in range(count):
            random = np.random.default_rng([count, clip])
            for kind in ("sharp", "blur"):
                (folder / part / f"clip_{clip:03d}" / kind).mkdir(parents=True)
            light = MAKER["texture"](random, 48, 48)
            for frame in range(4):
                both = {
                    "sharp": light,
                    "blur": np.mean([np.roll(light, shift, 1) for shift in (-1, 0, 1)], axis=0),
                }
                for kind, picture in both.items():
                    MAKER["save"](
                        picture, folder / part / f"clip_{clip:03d}" / kind / f"{frame:06d}.png"
                    )
    return gopro(folder, **{"use_rot": False, "gt_size": 32} | facts)


def deep_png(file: Path, width: int, height: int) -> None:
    """Three colours of 16 bits, which Pillow reads, with 8 bits, but does not write."""
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = (b"\0" + bytes(6 * width)) * height
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )
