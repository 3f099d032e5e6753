"""Ranks of a script whose Python runs no signal handler: they wait for other ranks in C."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.watchdog import wrapped
from training.watchdog.gpu_waits import BACKWARD
from training.watchdog.probes import flight_recorder, stacks
from training.watchdog.probes.stacks import Stack
from training.watchdog.probes.waits import in_collective, waits_for_device


def in_collectives(folder: Path, ranks: Mapping[int, int]) -> set[int]:
    """Those that wait in a collective now, or with an unfinished one for their GPU. `folder`: of
    the ranks' files; `ranks`: rank → PID."""
    pids = wrapped.trainings(ranks)
    found = stacks.dump(pids.values())
    return {rank for rank, pid in pids.items() if _is_held(folder, rank, found[pid])}


def _is_held(folder: Path, rank: int, stack: Stack | str) -> bool:
    main = stack.main if isinstance(stack, Stack) else None
    if main and main.frames:
        name = in_collective(main)
        if name not in (None, BACKWARD):
            return True
        if name is None and not waits_for_device(main.frames[0]):
            return False
    return flight_recorder.pending(folder, rank) is True
