"""The most detailed place of a clip as pictures: input, restored, target."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from training.tasks.evaluation import Kind, Picture
from training.tasks.video_restoration import metrics, network
from training.tasks.video_restoration.comparison_image import FRAMES

WIDTH, HEIGHT = 240, 180  # of a crop, pixels
SHOWN = 480  # width of a picture: crops are enlarged by an integer


def pictures(
    restore: Callable[[torch.Tensor], torch.Tensor],
    lq: torch.Tensor,
    gt: torch.Tensor,
    scale: int,
) -> list[Picture]:
    """A crop of the middle frame of one clip; lq (1, T, C, h, w), gt (1, T, 3, H, W)."""
    count = min(FRAMES, gt.shape[1])
    first = (gt.shape[1] - count) // 2
    lq, gt = lq[:, first : first + count], gt[:, first : first + count]
    middle = slice(count // 2, count // 2 + 1)
    given, found = network.enlarged(lq, scale)[:, middle], restore(lq)[:, middle]
    wanted = gt[:, middle]
    top, left = place(wanted[0, 0])
    seen: list[tuple[Kind, torch.Tensor]] = [
        ("input", given),
        ("output", found),
        ("target", wanted),
    ]
    return [
        Picture(
            kind,
            _png(frame[0, 0, :, top : top + HEIGHT, left : left + WIDTH]),
            None if kind == "target" else float(metrics.psnr(frame, wanted)[0]),
        )
        for kind, frame in seen
    ]


def place(frame: torch.Tensor) -> tuple[int, int]:
    """Top and left of the crop (HEIGHT × WIDTH, or less in a small frame) with the most edges;
    frame (3, H, W)."""
    grey = frame.float().mean(0, keepdim=True)[None]
    edges = F.pad((grey[..., 1:] - grey[..., :-1]).abs(), (0, 1))
    edges = edges + F.pad((grey[..., 1:, :] - grey[..., :-1, :]).abs(), (0, 0, 0, 1))
    size = min(HEIGHT, frame.shape[1]), min(WIDTH, frame.shape[2])
    sums = F.avg_pool2d(edges, size, stride=8)[0, 0]
    at = int(sums.argmax())
    return 8 * (at // sums.shape[1]), 8 * (at % sums.shape[1])


def _png(crop: torch.Tensor) -> bytes:
    values = crop.float().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(np.ascontiguousarray(values))
    times = max(1, SHOWN // picture.width)
    shown = picture.resize(
        (times * picture.width, times * picture.height), Image.Resampling.NEAREST
    )
    out = io.BytesIO()
    shown.save(out, "PNG", optimize=True)
    return out.getvalue()
