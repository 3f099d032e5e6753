"""Cosine periods of an option file. KAIR gives G_scheduler_restart_weights to torch as T_mult."""

from __future__ import annotations

from typing import Any

from training.config.jsonc import is_number
from training.config.schema import ENDLESS
from training.core.jsonl import Record
from training.tasks.video_restoration.options import VideoOptions

TYPE = "train.G_scheduler_type"
PERIODS = "train.G_scheduler_periods"
WEIGHTS = "train.G_scheduler_restart_weights"


def has_multiplier(found: Record) -> bool:
    """Whether the weights are a number with an effect in KAIR. A list, which torch refuses, has the
    heights of Duet's periods."""
    weights = found.get(WEIGHTS, 1)
    kind = found.get(TYPE, VideoOptions.G_scheduler_type)
    return kind == "CosineAnnealingWarmRestarts" and is_number(weights) and weights != 1


def periods(found: Record) -> list[int]:
    """The periods of torch's scheduler. A flag may extend the run, so they last for the longest
    one. [] for values that torch refuses."""
    length, multiplier = found.get(PERIODS, 0), found[WEIGHTS]
    if not (_is_whole(length, 1) and _is_whole(multiplier, 2)):
        return []
    lengths = [int(length)]
    while sum(lengths) < ENDLESS:
        lengths.append(lengths[-1] * int(multiplier))
    return lengths


def _is_whole(value: Any, least: int) -> bool:
    return is_number(value) and value % 1 == 0 and value >= least
