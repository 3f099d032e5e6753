"""The place of a process in a job, from its environment."""

from __future__ import annotations

from typing import Any

import pytest

from training.core.errors import UserError
from training.host import topology
from training.host.placement import LauncherOptions, Topology

RANK_ENV = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "2000",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def find(
    environ: dict[str, str], *, script: bool = True, gpus: bool = False, **asked: object
) -> Topology:
    return topology.find(environ, LauncherOptions(**asked), starts_ranks=script, several_gpus=gpus)  # type: ignore[arg-type]


def problems(environ: dict[str, str], **asked: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        find(environ, **asked)
    return [line for problem in caught.value.problems for line in problem.lines()]
