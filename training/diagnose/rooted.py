"""Collectives with a src or dst, which no rank can compare with that of the others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from training.core.contracts.verdict import EndRecord, FailureRecord

ROOTED = {
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "scatter",
    "scatter_object_list",
}
_NAME = re.compile(rf"(?<![\w/.(])(?:{'|'.join(ROOTED)})(?![\w/.])", re.ASCII)


def all_in_one(end: EndRecord) -> bool:
    """Do all ranks of a hang wait in the same of them, without one to blame?"""
    waiting = cast("FailureRecord", end).get("waiting") or {}  # a summary has none
    if end.get("rank") is not None or not waiting:
        return False
    found = [_NAME.search(place) for place in waiting.values()]
    return all(found) and len({name[0] for name in found if name}) == 1
