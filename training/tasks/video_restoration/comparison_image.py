"""Comparison pictures: blurred, restored and sharp frames side by side, with their PSNR."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from training.tasks.video_restoration import metrics, network
from training.tasks.video_restoration.dataset import Validation

CLIPS = 3
# frames around the middle of a clip: enough context for the network to restore the frame shown
FRAMES = 12
PANEL = 320  # maximum width of a picture; three with gaps are less than 1000 pixels
GAP, LABEL = 4, 18
PAPER, INK = (255, 255, 255), (30, 30, 30)


def write(
    restore: Callable[[torch.Tensor], torch.Tensor],
    data: Validation,
    scale: int,
    device: torch.device,
    folder: Path,
) -> str | None:
    """Write folder/restored_CLIP.png for a few clips. Returns 'CLIP: 24.1 → 27.3 dB, …' for the
    frames shown. Raises OSError."""
    results, names = [], set[str]()
    clips = data.frames.clips
    for index in sorted({round(i * (len(clips) - 1) / max(1, CLIPS - 1)) for i in range(CLIPS)}):
        clip = clips[index]
        count = min(FRAMES, len(clip.gt))
        sample = data.part(index, (len(clip.gt) - count) // 2, count)
        lq, gt = sample["lq"][None].to(device), sample["gt"][None].to(device)
        given, found = network.enlarged(lq, scale), restore(lq)
        before, after = (float(metrics.psnr(x, gt)[0]) for x in (given, found))
        results.append(f"{clip.name}: {before:.1f} → {after:.1f} dB")
        middle = slice(count // 2, count // 2 + 1)
        one = [float(metrics.psnr(x[:, middle], gt[:, middle])[0]) for x in (given, found)]
        labels = [f"blurred {one[0]:.2f} dB", f"restored {one[1]:.2f} dB", "sharp"]
        picture = _strip([_picture(x[0, count // 2]) for x in (given, found, gt)], labels)
        name = re.sub(r"[^\w.-]", "_", clip.name)
        while name in names:
            name += "_"
        names.add(name)
        picture.save(folder / f"restored_{name}.png")
    return ", ".join(results) or None


def _picture(frame: torch.Tensor) -> Image.Image:
    """(3, H, W) as a picture as large as a panel allows; small frames are enlarged by integer
    factors, so that pixels are visible."""
    values = frame.float().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(np.ascontiguousarray(values))
    width, height = picture.size
    if width > PANEL:
        return picture.resize((PANEL, max(1, height * PANEL // width)), Image.Resampling.LANCZOS)
    return picture.resize(
        (width * (PANEL // width), height * (PANEL // width)), Image.Resampling.NEAREST
    )


def _strip(pictures: list[Image.Image], labels: list[str]) -> Image.Image:
    width, height = pictures[0].size
    out = Image.new("RGB", (len(pictures) * (width + GAP) - GAP, height + LABEL), PAPER)
    pen = ImageDraw.Draw(out)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        out.paste(picture, (number * (width + GAP), LABEL))
        pen.text((number * (width + GAP) + 2, 3), label, fill=INK)
    return out
