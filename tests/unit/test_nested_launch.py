"""A launcher for a user script in a process that is already a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.conftest import only
from training.core.errors import Problem, UserError
from training.plan import script_request
from training.plan.script_words import RUN

LAUNCH = "launch_train.sh"


def open_mpi(size: int, local: int) -> dict[str, str]:
    values = {"RANK": 1, "SIZE": size, "LOCAL_RANK": 1 % local, "LOCAL_SIZE": local}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def tasks(nodes: int, here: str) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_NTASKS": "8"}
    step |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    return step | {"SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": here}


INTEL = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
ADDRESS = {"MASTER_ADDR": "10.0.0.1"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= ADDRESS | {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}


def refused(program: str, words: list[str], environ: dict[str, str]) -> Problem:
    with pytest.raises(UserError) as caught:
        script_request.read(program, words, environ)
    return only(caught.value.problems)


def test_one_launcher_for_each_machine_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    address = ["--master_addr=10.0.0.1"]  # SLURM is not asked for it
    words = ["1", "--retries=1", "--script=train.py", "--", "--x"]
    for environ, fix in (
        (open_mpi(2, 2), "./duet run -n 2 --retries=1 train.py --x   # without mpirun"),
        (
            open_mpi(8, 4) | ADDRESS,
            "mpirun -n 2 --map-by ppr:1:node --bind-to none … ./duet run -n 4 ",
        ),
        (INTEL | ADDRESS, "mpirun -n 2 -ppn 1 … ./duet run -n 2 "),
        (tasks(1, "8"), "srun --ntasks=1 --ntasks-per-node=1 ./duet run -n 8 "),
        (tasks(2, "4(x2)"), "srun --ntasks=2 --ntasks-per-node=1 ./duet run -n 4 "),
        (TORCHRUN, "python train.py …   # this process is a rank"),
    ):
        given = [words[0], *address, *words[1:]] if "SLURM_JOB_ID" in environ else words
        problem = refused(RUN, given, environ)
        assert problem.code == "launch.nested" and problem.fixes[0].startswith(fix), problem
        assert problem.what.startswith("this process is already a rank: ")
    fix = refused(LAUNCH, ["--retries=1", *words[:1], *words[2:]], open_mpi(2, 2)).fixes[0]
    assert fix.startswith("./launch_train.sh --retries=1 2 --script=train.py -- --x")
