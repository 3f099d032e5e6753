"""Piecewise restoration of long clips and large frames, as in KAIR, for what does not fit into
memory whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from training.tasks.video_restoration.folders import OVERLAP

Restore = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def restored(
    model: Restore, frames: torch.Tensor, *, scale: int, steps: int, overlap: int, side: int
) -> torch.Tensor:
    """(B, T, C, h, w) → (B, T, 3, h × scale, w × scale).

    `steps`: frames per piece; `overlap`: frames shared by two pieces, averaged; `side`: of a square
    in input pixels; 0: whole.
    """
    count = frames.shape[1]
    if not steps or steps >= count:
        return _squares(model, frames, scale, side)
    out = frames.new_zeros(
        *frames.shape[:2], 3, frames.shape[3] * scale, frames.shape[4] * scale, dtype=torch.float32
    )
    times = frames.new_zeros(count)
    for first in starts(count, steps, steps - overlap):
        out[:, first : first + steps] += _squares(
            model, frames[:, first : first + steps], scale, side
        )
        times[first : first + steps] += 1
    return out / times.view(1, -1, 1, 1, 1)


def starts(length: int, size: int, stride: int) -> list[int]:
    """Starts of pieces of `size` that cover `length`; the last piece ends at `length`."""
    return [*range(0, max(0, length - size), stride), max(0, length - size)]


def _squares(model: Restore, frames: torch.Tensor, scale: int, side: int) -> torch.Tensor:
    """Restore in squares. Each of two overlapping squares contributes its half of the overlap,
    since a square has less context near its border."""
    height, width = frames.shape[-2:]
    if not side or (side >= height and side >= width):
        return model(frames).float()
    out = frames.new_empty(*frames.shape[:2], 3, height * scale, width * scale, dtype=torch.float32)
    rows, columns = starts(height, side, side - OVERLAP), starts(width, side, side - OVERLAP)
    for top in rows:
        for left in columns:
            piece = model(frames[..., top : top + side, left : left + side]).float()
            # Row by row from the top: later squares overwrite the half that is theirs.
            y, x = (OVERLAP // 2 if top else 0), (OVERLAP // 2 if left else 0)
            found = piece[..., y * scale :, x * scale :]
            down, right = (top + y) * scale, (left + x) * scale
            out[..., down : down + found.shape[-2], right : right + found.shape[-1]] = found
    return out
