"""The GPU of stages with one rank, and what others do on the GPUs that are measured. Called by the
probe, in the Python of the trainings."""

from __future__ import annotations

import os
from typing import Any

from training.core import units
from training.host import gpu_claims, gpus
from training.host.gpu_choice import emptiest_gpus
from training.host.gpu_processes import MPS, MUCH
from training.host.gpus import VISIBLE, Gpu
from training.host.utilization import BUSY_PERCENT


def choose() -> dict[str, Any]:
    """`first`: CUDA_VISIBLE_DEVICES of one rank, the GPU that the launcher takes for it, too; from
    now on CUDA numbers it as the first one here. `in_use`: a line for each GPU that others use."""
    found = gpus.inventory(patient=True)
    choice = emptiest_gpus(found, 1, os.environ, hide=False, claims=gpu_claims.others())
    os.environ.update(choice.environ(os.environ))
    every = choice.machine.gpus
    measured = every if len(every) == 2 else every[:1]  # of more, the launcher chooses two
    lines = [_line(gpu) for gpu in measured]
    return {
        "first": os.environ.get(VISIBLE, "0").partition(",")[0],
        "in_use": [line for line in lines if line],
    }


def _line(gpu: Gpu) -> str:
    """'' for an idle GPU."""
    used = (gpu.total_bytes or 0) - (gpu.free_bytes or 0) if gpu.free_bytes is not None else 0
    pids = [str(one.pid) for one in gpu.processes if MPS not in one.command]
    percent = gpu.use_percent or 0
    if not pids and used <= MUCH and percent < BUSY_PERCENT:
        return ""
    processes = f", PID {', '.join(pids)}" if pids else ""
    return f"GPU {gpu.index}: {units.gib(used)} GiB and {percent} % in use{processes}"
