"""The command that continues a run on several machines without flags for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, TRAIN
from tests.unit.test_summary import plan
from training.core.next_command import next_command
from training.core.rundir import RunDir

STEP = {"kind": "node", "source": "slurm", "nnodes": 2}
SRUN = {"kind": "rank", "source": "slurm", "nnodes": 1, "world_size": 8, "local_world_size": 4}
TORCHRUN = SRUN | {"source": "torchrun"}


@each(
    "script, place, command",
    [
        (LAUNCH, STEP, "./launch_train.sh 4"),
        (LAUNCH, STEP | {"nnodes": 1}, "./launch_train.sh 8"),
        (TRAIN, TORCHRUN, "torchrun --nnodes=2 --nproc_per_node=4 train.py"),
        (TRAIN, TORCHRUN | {"local_world_size": 8}, "torchrun --nproc_per_node=8 train.py"),
        (TRAIN, TORCHRUN | {"local_world_size": 0}, "torchrun --nproc_per_node=8 train.py"),
        (TRAIN, SRUN, "srun python -u train.py"),
    ],
)
def test_the_ranks_of_one_machine(script: str, place: dict[str, Any], command: str) -> None:
    made: Any = plan(script, 8) | {"place": place, "local_ranks": 4}
    assert next_command(made, RunDir("experiments/run1")) == f"{command} --resume=run1"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_ranks_before_some_were_lost(nnodes: int) -> None:
    elastic = {"min_ranks": 2, "ranks": 8, "per_node": 4, "device_batch_size": None, "lost": []}
    made: Any = plan(LAUNCH, 6) | {"place": STEP | {"nnodes": nnodes}, "local_ranks": 3}
    command = next_command(made | {"elastic": elastic}, RunDir("experiments/run1"))
    assert command == f"./launch_train.sh {4 if nnodes == 2 else 8} --resume=run1"
