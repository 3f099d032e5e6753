"""Plan lines and notes about the clips."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.core.messages import msg
from training.core.units import plural
from training.tasks.video_restoration import folders
from training.tasks.video_restoration.listing import PARTS, Clip, number_of, some


def lines_and_notes(options: Any) -> tuple[list[str], list[str]]:
    """Raises UserError as folders.clips() does."""
    found = {part: folders.clips(options, part) for part in PARTS}
    roots = {part: getattr(options, f"{prefix}dataroot_gt") for part, prefix in PARTS.items()}
    notes = [note for part, clips in found.items() if (note := _gaps(roots[part], clips))]
    notes += _trained_on(found["train"], found["val"])
    return [_sentence(options, found["train"], found["val"])], notes


def _sentence(options: Any, train: Sequence[Clip], val: Sequence[Clip]) -> str:
    def much(clips: Sequence[Clip]) -> str:
        frames = sum(len(clip.gt) for clip in clips)
        return msg("tasks.video.check.much", clips=plural(len(clips), "clip"), frames=frames)

    root, held = options.dataroot_gt, options.test_dataroot_gt
    return (
        msg(
            "tasks.video.check.data_and_validation",
            root=root,
            much=much(train),
            held=held,
            held_much=much(val),
        )
        if held
        else msg("tasks.video.check.data", root=root, much=much(train))
    )


def _trained_on(train: Sequence[Clip], val: Sequence[Clip]) -> list[str]:
    """A note on the validation clips that are training clips too, if there are any."""

    def place(clip: Clip) -> str:
        return os.path.realpath(os.path.dirname(clip.gt[0]))

    trained = {place(clip) for clip in train} if val else set()
    names = [clip.name for clip in val if place(clip) in trained]
    if not names:
        return []
    clips = plural(len(names), "clip")
    return [msg("tasks.video.check.trained_on", clips=clips, names=some(names))]


def _gaps(root: str, clips: Sequence[Clip]) -> str:
    """A note on missing frames, of which the samples do not know; "" if there are none."""
    found = [
        msg("tasks.video.check.gap", name=clip.name, before=before, after=after)
        for clip in clips
        for before, after in gaps([Path(file).stem for file in clip.gt])[:1]
    ]
    if not found:
        return ""
    return msg(
        "tasks.video.check.gaps",
        root=root,
        clips=plural(len(found), "clip"),
        places=some(found),
    )


def gaps(stems: Sequence[str]) -> list[tuple[str, str]]:
    """The frames before and after each gap in the numbers. Names of most frames must have one
    distance; in times of a constant rate a gap exceeds it by more than their rounding."""
    pairs = [(before, after) for before, after in pairwise(stems) if _text(before) == _text(after)]
    distances = [number_of(after) - number_of(before) for before, after in pairs]
    usual, times = Counter(distances).most_common(1)[0] if distances else (0, 0)
    if usual < 1 or 2 * times < len(distances):
        return []
    return [pair for pair, distance in zip(pairs, distances, strict=True) if distance > 1.5 * usual]


def _text(stem: str) -> str:
    """A name without the number of its frame."""
    return re.sub(r"\d+(?=\D*$)", "", stem)
