"""Ranks of a finding that may wait for their own GPU rather than for other ranks."""

from __future__ import annotations

from collections.abc import Collection

from training.core.messages import msg
from training.watchdog.hang_report import HangFinding

# waited for, possibly because it waits for other ranks; or for a place in its queue
GPU, QUEUE = msg("watchdog.gpu"), msg("watchdog.gpu_queue")
BACKWARD, BARRIER = "backward", "barrier"  # may compute, or wait for earlier work of its GPU


def on_gpu(found: HangFinding, name: str = GPU) -> list[int]:
    """Ranks that wait for their GPU, which may be computing; QUEUE: for a place in its queue, or
    compute themselves."""
    return [
        rank
        for rank, place in sorted(found.waiting.items())
        if place.startswith(msg("watchdog.waits_in", name=name, at=""))
    ]


def may_compute(found: HangFinding, gpus: Collection[int]) -> list[int]:
    """Ranks that wait for their GPU, for a place in its queue, or in a backward there. `gpus`: the
    ranks that use one."""
    backward = [rank for rank in on_gpu(found, BACKWARD) if rank in gpus]
    return [*on_gpu(found), *on_gpu(found, QUEUE), *backward]
