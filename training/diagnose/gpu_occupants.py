"""The processes that have exhausted the memory of a GPU, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import units
from training.core.messages import msg
from training.host.gpu_processes import MUCH, is_desktop

if TYPE_CHECKING:
    from training.core.contracts.verdict import OccupiedRecord


def text(found: OccupiedRecord) -> str:
    """One line."""
    shown = [
        msg("diagnose.gpus.process", pid=p["pid"], user=p["user"], command=p["command"])
        if p["known"]
        else msg("diagnose.gpus.process_of_host", pid=p["pid"])
        for p in found["processes"]
    ]
    return msg(
        "diagnose.gpus.held",
        gpu=found["gpu"],
        held=units.gib(found["held_bytes"]),
        total=units.gib(found["total_bytes"]),
        processes=msg("diagnose.gpus.comma").join(shown) or msg("diagnose.gpus.unlisted"),
    )


def values(found: OccupiedRecord) -> dict[str, str]:
    """For the sentences of advice. The process to end is one whose end frees much."""
    ends = [
        p
        for p in found["processes"]
        if p["known"]
        and not is_desktop(p["command"])
        and (p["used_bytes"] is None or p["used_bytes"] >= MUCH)
    ]
    one = {"held_pid": str(ends[0]["pid"]), "held_by": ends[0]["command"][:40]} if ends else {}
    return {"held_gpu": str(found["gpu"]), **one}
