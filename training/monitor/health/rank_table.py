"""Table of the ranks below the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from training.monitor.health import progress_checks
from training.monitor.health.activity import ActivityWindow, RankActivity
from training.monitor.health.target import Target
from training.watchdog import stall_detector

if TYPE_CHECKING:
    from training.core.contracts.state import HealthRow, RankState, RunState

_RESIDENT = re.compile(r"^VmRSS:\s*(\d+) kB", re.MULTILINE)
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked in I/O",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
}


def rank_rows(
    target: Target,
    looked: ActivityWindow,
    state: RunState | None,
    on: dict[int, tuple[int, int]],
) -> list[HealthRow]:
    """One row for each expected rank. `on`: index of its GPU, bytes that it holds there."""
    recorded = {r["rank"]: r for r in state["ranks"]} if state else {}
    return [
        _row(target, motion, recorded.get(rank), *on.get(rank, (None, None)))
        for rank, motion in sorted(
            {
                **{rank: RankActivity(rank, None) for rank in target.missing},
                **looked.motions,
            }.items()
        )
    ]


def _row(
    target: Target,
    m: RankActivity,
    recorded: RankState | None,
    gpu: int | None,
    gpu_bytes: int | None,
) -> HealthRow:
    waits = stall_detector.waits(m.course) if m.course else None
    return {
        "rank": m.rank,
        "pid": m.pid,
        "here": m.rank not in target.elsewhere,
        "state": STATES.get(m.states[-1:], m.states[-1:]) or None,
        "phase": str(m.after) if m.after else None,
        "phase_s": round(m.after.age_s, 1) if m.after and m.pid else None,
        "epoch": m.after.epoch if m.after else None,
        "step_before": m.before.step if m.before else None,
        "step": m.after.step if m.after else None,
        "where": progress_checks.where(m),
        "waits_in": waits,
        "collectives_before": m.calls[0] if m.calls else None,
        "collectives": m.calls[1] if m.calls else None,
        "cpu": None if m.cpu is None else round(m.cpu, 2),
        "gpu": gpu,
        "gpu_memory_bytes": gpu_bytes or None,
        "memory_bytes": int((recorded.get("memory_bytes") if recorded else None) or 0)
        or _resident(m.pid),
        "compute_ms_median": recorded.get("compute_ms_median") if recorded else None,
        "variables": {k: v for k, v in target.variables.get(m.rank, {}).items() if k != "RANK"},
    }


def at_the_end(state: RunState) -> list[HealthRow]:
    """Rows of a run that has ended: the last phase and step of each rank."""
    return [
        {
            "rank": r["rank"],
            "pid": r["pid"],
            "phase": r["doing"],
            "epoch": r["epoch"],
            "step": r["step"],
            "memory_bytes": r["memory_bytes"],
        }
        for r in state["ranks"]
    ]


def _resident(pid: int | None) -> int | None:
    """Resident memory of the process in bytes."""
    try:
        found = _RESIDENT.search(Path(f"/proc/{pid}/status").read_text()) if pid else None
    except OSError:  # gone
        return None
    return int(found[1]) * 1024 if found else None
