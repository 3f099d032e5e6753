"""Piecewise restoration of long clips and large frames, for what does not fit into memory whole:
pieces in time and squares as in KAIR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from training.tasks.video_restoration.folders import OVERLAP

Restore = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def restored(
    model: Restore, frames: torch.Tensor, *, scale: int, steps: int, overlap: int, side: int
) -> torch.Tensor:
    """(B, T, C, h, w) → (B, T, 3, h × scale, w × scale). Arguments as of streamed()."""
    found = streamed(model, frames.unbind(1), scale=scale, steps=steps, overlap=overlap, side=side)
    return torch.stack(list(found), 1)


def streamed(
    model: Restore,
    frames: Iterable[torch.Tensor],
    *,
    scale: int,
    steps: int,
    overlap: int,
    side: int,
    shared: int = OVERLAP,
) -> Iterator[torch.Tensor]:
    """Frames (B, C, h, w) of any number → restored frames (B, 3, h × scale, w × scale), float32.
    Two pieces are in memory at a time.

    `steps`: frames per piece, the last of which ends with the clip; 0: whole; `overlap`: frames
    shared by two pieces, averaged; `side`: of a square in input pixels; 0: whole; `shared`: pixels
    shared by two squares, each of which contributes its half.
    """
    held: list[torch.Tensor] = []  # frames from number `low` on
    sums: list[torch.Tensor] = []  # restored frames from number `low` on, to be divided by …
    times: list[int] = []  # … the number of pieces that contain them
    low = start = count = 0

    def piece(begin: int) -> None:
        part = torch.stack(held[begin - low : begin - low + steps] if steps else held, 1)
        with torch.no_grad():
            found = _squares(model, part, scale, side, shared)
        for place, frame in enumerate(found.unbind(1), begin - low):
            if place < len(sums):
                sums[place] += frame
                times[place] += 1
            else:
                sums.append(frame)
                times.append(1)

    def final(number: int) -> Iterator[torch.Tensor]:
        """The next restored frames, which no further piece contains."""
        nonlocal low
        for each, often in zip(sums[:number], times[:number], strict=True):
            yield each / often if often > 1 else each
        del held[:number], sums[:number], times[:number]
        low += number

    for frame in frames:
        held.append(frame)
        count += 1
        if steps and count > start + steps:  # so this piece is not the last
            piece(start)
            # the last piece begins one frame later or more
            yield from final(start + 1 - low)
            start += steps - overlap
    if count:
        piece(max(0, count - steps) if steps else 0)
        yield from final(len(sums))


def starts(length: int, size: int, stride: int) -> list[int]:
    """Starts of pieces of `size` that cover `length`; the last piece ends at `length`."""
    return [*range(0, max(0, length - size), stride), max(0, length - size)]


def _squares(
    model: Restore, frames: torch.Tensor, scale: int, side: int, shared: int
) -> torch.Tensor:
    """Restore in squares. Each of two overlapping squares contributes its half of the overlap,
    since a square has less context near its border."""
    height, width = frames.shape[-2:]
    if not side or (side >= height and side >= width):
        return model(frames).float()
    out = frames.new_empty(*frames.shape[:2], 3, height * scale, width * scale, dtype=torch.float32)
    rows, columns = starts(height, side, side - shared), starts(width, side, side - shared)
    for top in rows:
        for left in columns:
            piece = model(frames[..., top : top + side, left : left + side]).float()
            # Row by row from the top: later squares overwrite the half that is theirs.
            y, x = (shared // 2 if top else 0), (shared // 2 if left else 0)
            found = piece[..., y * scale :, x * scale :]
            down, right = (top + y) * scale, (left + x) * scale
            out[..., down : down + found.shape[-2], right : right + found.shape[-1]] = found
    return out
