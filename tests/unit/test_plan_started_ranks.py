"""The plan of a rank that another launcher has started: what it knows of the other ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import LAUNCH, ROOT, SIMPLE, TRAIN
from training.core.errors import Exit, UserError
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan import communication
from training.plan import training_plan as planner

GIB = 1 << 30
FAR, HERE = "10.0.0.1", "127.0.0.1"
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> Plan:
    """plan(2, MASTER_ADDR=FAR): train.py as rank 0 of two, where two GPUs are visible."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the claims of GPUs
    monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
    monkeypatch.setattr(planner.toolchain, "missing", lambda *_: {})
    towards = ("eth1", "10.0.0.9")
    monkeypatch.setattr(planner.env_vars.network, "interface_towards", lambda name: towards)

    def made(
        gpus: int,
        free: int = 31,
        script: Sequence[str] = (TRAIN,),
        test: communication.Test | None = None,
        **environ: str,
    ) -> dict[str, Any]:
        cards = tuple(
            Gpu(n, f"GPU-{n}", "Card", 32 * GIB, free * GIB, 0, 40, 70.0, (12, 0))
            for n in range(gpus)
        )
        found = GpuInventory(cards, "", "580", "13.0")
        monkeypatch.setattr(planner.gpus, "inventory", lambda environ, **_: found)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
        args = [*script[1:], "configs/dual_gpu/balanced.py"]
        environ = rank | {"MASTER_ADDR": HERE} | environ
        request, plan, checks = planner.make(script[0], args, environ, test=test)
        result: dict[str, Any] = plan | {}
        result["set"] = {v["name"]: v["value"] for v in plan["variables"]}
        result["starter"] = request.starter
        result["checks"] = {check.name: check.status for check in checks}
        return result

    return made


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({"MASTER_ADDR": FAR}, "eth1"),
        ({"MASTER_ADDR": FAR, "LOCAL_WORLD_SIZE": "1"}, "eth1"),
        ({"MASTER_ADDR": FAR, "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"MASTER_ADDR": HERE}, "lo"),
    ],
)
def test_only_ranks_known_to_be_on_one_machine_use_loopback(
    environ: dict[str, str], interface: str, plan: Plan
) -> None:
    found = plan(2, **environ)["set"]
    assert found["NCCL_SOCKET_IFNAME"] == f"={interface}"
    assert found["GLOO_SOCKET_IFNAME"] == interface


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {
    **{"RANK": "", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}


@pytest.mark.parametrize("environ", [TORCHRUN, MPIRUN], ids=["torchrun", "mpirun"])
def test_ranks_with_the_same_environment_see_the_same_gpu(
    environ: dict[str, str], plan: Plan
) -> None:
    with pytest.raises(UserError) as caught:
        plan(1, **environ)
    (problem,) = caught.value.problems
    assert (caught.value.code, problem.code) == (Exit.RESOURCES, "preflight.gpus")
    assert len(plan(2, **environ)["gpus"]) == 2
    assert len(plan(1, **environ, CUDA_VISIBLE_DEVICES="0")["gpus"]) == 1, "each has its own"


def test_a_platform_may_give_each_rank_a_gpu(plan: Plan) -> None:
    assert len(plan(1, LOCAL_WORLD_SIZE="2")["gpus"]) == 1


@pytest.mark.parametrize("local_rank", ["0", "3"])
@pytest.mark.parametrize(
    ("script", "gpus", "local"),
    [
        ((TRAIN,), 8, 8),
        ((LAUNCH, "8"), 8, 8),
        ((LAUNCH, "16"), 8, 8),  # all ranks were typed
        ((LAUNCH, "8"), 1, 8),  # each has its own
        ((SIMPLE,), 8, 8),
    ],
)
def test_a_platform_that_does_not_count_the_ranks_of_a_machine(
    local_rank: str, script: tuple[str, ...], gpus: int, local: int, plan: Plan
) -> None:
    environ = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "16"}
    words = (*script, "--total_batch_size=393216")
    made = plan(gpus, script=words, MASTER_ADDR=FAR, **environ)
    assert (made["ranks"], made["local_ranks"]) == (16, local)
    assert len(made["gpus"]) == gpus


@pytest.mark.parametrize(
    ("address", "rank", "local"), [(HERE, "0", 4), (HERE, "3", 4), (FAR, "0", 1), (FAR, "1", 2)]
)
def test_the_ranks_of_one_machine_see_their_own_gpu(
    address: str, rank: str, local: int, plan: Plan
) -> None:
    """Those of the first of several machines have the same numbers."""
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": address}
    made = plan(1, script=(LAUNCH, "4", "--total_batch_size=393216"), **environ)
    assert (made["ranks"], made["local_ranks"]) == (4, local)


def test_machines_with_one_gpu_have_one_rank_each(plan: Plan) -> None:
    """The number typed in a launch script is that of all ranks."""
    words = (LAUNCH, "16", "--total_batch_size=393216")
    made = plan(1, script=words, MASTER_ADDR=FAR, RANK="3", WORLD_SIZE="16")
    assert (made["ranks"], made["local_ranks"]) == (16, 1)


@pytest.mark.parametrize(
    ("local_rank", "flags", "tested"),
    [("", (), True), ("", ("--dry_run",), False), ("0", (), False)],
    ids=["node", "dry run", "rank"],
)
def test_a_node_tests_and_claims_its_gpus(
    local_rank: str, flags: tuple[str, ...], tested: bool, plan: Plan
) -> None:
    seen: list[int] = []
    words = (TRAIN, "--communication_test=1", "--total_batch_size=98304", *flags)

    def test(begun: Any) -> None:
        seen.append(begun["local_ranks"])

    made = plan(2, script=words, test=test, LOCAL_RANK=local_rank, MASTER_ADDR=FAR)
    assert seen == ([2] if tested else [])
    assert made["starter"] == (os.getpid() if tested else 0)


@pytest.mark.parametrize(("gpus", "silent"), [(1, False), (2, True)])
def test_a_rank_reports_what_only_it_sees_of_its_own_gpu(
    gpus: int, silent: bool, plan: Plan
) -> None:
    with pytest.raises(UserError) as caught:
        plan(gpus, free=0, RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert (caught.value.code, caught.value.said_by_another) == (Exit.RESOURCES, silent)


@pytest.mark.parametrize(
    ("local_rank", "free", "codes", "silent"),
    [
        ("0", 0, ["gpu", "log_folder"], False),
        ("1", 0, ["gpu"], False),
        ("1", 31, ["log_folder"], True),
    ],
)
def test_a_problem_of_the_machine_is_reported_by_its_first_rank_alone(
    local_rank: str, free: int, codes: list[str], silent: bool, plan: Plan, home: Path
) -> None:
    (home / "file").touch()
    words = (TRAIN, f"--log_dir={home}/file")
    with pytest.raises(UserError) as caught:
        plan(1, free, words, RANK=local_rank, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE="2")
    found = [problem.code for problem in caught.value.problems]
    assert found == [f"preflight.{code}" for code in codes]
    assert caught.value.said_by_another is silent


def test_ranks_that_srun_has_bound_do_not_divide_their_cores(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 1)
    found = plan(2, **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"), ""), **step)
    assert found["place"]["source"] == "slurm" and found["set"]["OMP_NUM_THREADS"] == "1"
    assert found["checks"]["CPU"] == "ok"
