"""Whether the run or other processes have exhausted the memory of a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from training.core import log
from training.core.messages import msg
from training.diagnose import exception_cause
from training.host.gpu_processes import MPS, MUCH, SOME
from training.host.visible_devices import PART

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuProcessRecord, GpuRecord, Plan
    from training.core.contracts.verdict import ExhaustedMemoryRecord, OccupiedRecord


def occupants(
    plan: Plan, place: int, memory: ExhaustedMemoryRecord | None, run_pids: Collection[int]
) -> OccupiedRecord | None:
    """The other processes on the GPU at this place of the plan if they, not the run, have exhausted
    it, by the driver's list after the ranks have ended. `memory`: what its rank had used;
    `run_pids`: processes of the run."""
    planned = plan["gpus"][place]
    part = [planned["uuid"]] if planned["uuid"].startswith(PART) else []
    try:
        machine = exception_cause.ask_driver(exception_cause.DRIVER_S, part)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning(msg("launcher.failure.processes_unread", error=error))
        return None
    gpu = next((one for one in machine["gpus"] if one["uuid"] == planned["uuid"]), None)
    if gpu is None or gpu["total_bytes"] is None or (held := _held(gpu)) is None:
        return None
    estimate = plan["memory"]["total_bytes"] if plan.get("memory") else None
    own = memory["reserved_bytes"] + memory.get("requested_bytes", 0) if memory else 0
    grown = held - (_held(planned) or 0) >= MUCH
    if held < MUCH or own >= (estimate or held):
        return None
    if not grown and gpu["total_bytes"] - held >= (estimate or 0):
        return None
    listed = (*gpu["processes"], *_drawing(gpu.get("displays", ())))
    others = [p for p in listed if p["pid"] not in run_pids and MPS not in p["command"]]
    return {
        "gpu": gpu["index"],
        "held_bytes": held,
        "total_bytes": gpu["total_bytes"],
        "processes": sorted(others, key=lambda p: -(p["used_bytes"] or 0)),
    }


def _drawing(displays: Sequence[GpuProcessRecord]) -> list[GpuProcessRecord]:
    """Those with much memory, also together: every desktop has small ones. Where the driver does
    not report their memory, it may be theirs."""
    sizes = [p["used_bytes"] for p in displays]
    single = any(size is None or size >= MUCH for size in sizes)
    least = MUCH if single or sum(filter(None, sizes)) < MUCH else SOME
    return [p for p in displays if p["used_bytes"] is None or p["used_bytes"] >= least]


def _held(gpu: GpuRecord) -> int | None:
    """Includes memory of processes that the driver does not list, as in a container."""
    if gpu["total_bytes"] is None or gpu["free_bytes"] is None:
        return None
    return gpu["total_bytes"] - gpu["free_bytes"]
