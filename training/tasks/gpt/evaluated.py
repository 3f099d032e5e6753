"""The part of the validation text that a run measures."""

from __future__ import annotations

from collections.abc import Sequence


def spread(count: int, wanted: int) -> Sequence[int]:
    """Which `wanted` of `count` sequences: evenly spread, since the first files of a corpus may be
    of one kind."""
    wanted = min(count, wanted)
    return [number * count // wanted for number in range(wanted)]
