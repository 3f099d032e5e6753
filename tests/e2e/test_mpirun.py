"""A real mpirun of Open MPI starts the ranks, or one launch script on each of two machines."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import nobody_left
from tests.e2e import sshd
from tests.e2e.conftest import Launched

MPIRUN = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
CONFIG = "configs/dual_gpu/quickstart.py"
# it refuses to run as root, as in most containers
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Launch = Callable[..., Launched]

pytestmark = pytest.mark.skipif(not MPIRUN, reason="mpirun not installed (openmpi-bin)")


@pytest.mark.slow
def test_mpirun_starts_the_ranks(launch: Launch) -> None:
    words = ("--oversubscribe", "--bind-to", "none", "-n", "2", "./launch_train.sh", "2", CONFIG)
    run = launch(str(MPIRUN), *words, env=ROOT).ok()
    assert "mode rank 0 of 2: mpirun has started 2 ranks (OMPI_COMM_WORLD_SIZE)" in run.output
    assert len(run.steps[12]["compute_ms"]) == 2, "one training of two ranks"


@pytest.mark.soak
def test_mpirun_starts_a_node_on_each_machine(launch: Launch, tmp_path: Path) -> None:
    if why := sshd.missing():
        pytest.skip(why)
    token = uuid.uuid4().hex
    folder = tmp_path / "ssh"
    folder.mkdir()
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in sshd.MACHINES))
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\nexec ssh -F '{folder}/client' \"$@\"\n")
    shell.chmod(0o755)
    with sshd.server(folder, token):
        run = launch(
            *(str(MPIRUN), "--mca", "plm_rsh_agent", str(shell), "--bind-to", "none"),
            *("--hostfile", str(tmp_path / "hosts"), "-x", "MASTER_ADDR=127.0.0.1", "-n", "2"),
            *("./launch_train.sh", "1", CONFIG),
            env=ROOT,
        ).ok()
        nobody_left(token)
    assert "node 1 has joined" in run.output
    assert "mpirun has started one process on each of 2 machines" in run.output
    assert len(run.steps[12]["compute_ms"]) == 2
