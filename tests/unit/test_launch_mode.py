"""Place of a process in a job: every way to be started, precedence, and refusals."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from training.core.errors import Exit, UserError
from training.host import slurm_env, topology
from training.host.placement import DEFAULT_PORT, LOCAL, NODE, RANK, LauncherOptions, Topology

RANK_ENV = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "2000",
}
NODE_ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2000"}
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


def problems(environ: dict[str, str], **asked: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        find(environ, **asked)
    return [line for problem in caught.value.problems for line in problem.lines()]


def test_plain_is_local() -> None:
    place = find({"HOME": "/root"})
    assert (place.kind, place.leftovers, place.sentence()) == (
        LOCAL,
        (),
        "mode local: no launcher has started ranks",
    )


def test_started_by_torchrun() -> None:
    place = find(RANK_ENV | {"TORCHELASTIC_RUN_ID": "none"})
    assert (
        place.kind,
        place.source,
        place.rank,
        place.local_rank,
        place.world_size,
        place.local_world_size,
    ) == (
        RANK,
        "torchrun",
        3,
        1,
        4,
        2,
    )
    assert (
        place.sentence()
        == "mode rank 3 of 4: torchrun or Duet has started the ranks (TORCHELASTIC_RUN_ID is set)"
    )
    alone = find({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.kind, alone.world_size) == (RANK, 1), "torchrun --nproc_per_node=1"


def test_platform_injects_ranks() -> None:
    place = find(RANK_ENV)
    assert (place.kind, place.source, place.rank) == (RANK, "platform", 3)
    assert place.variables() == RANK_ENV


@pytest.mark.parametrize(
    ("address", "local"), [("127.0.0.1", 4), ("localhost", 4), ("10.0.0.1", 0)]
)
def test_local_ranks_are_known_only_if_all_ranks_are_local(address: str, local: int) -> None:
    environ = {k: v for k, v in RANK_ENV.items() if k != "LOCAL_WORLD_SIZE"}
    assert find(environ | {"MASTER_ADDR": address}).local_world_size == local


def test_platform_injects_nodes() -> None:
    for script in (True, False):
        place = find(NODE_ENV, script=script)
        assert (
            place.kind,
            place.source,
            place.node_rank,
            place.nnodes,
            place.master_addr,
            place.master_port,
        ) == (
            NODE,
            "platform",
            1,
            2,
            "10.0.0.1",
            2000,
        )
    assert (
        find({k: v for k, v in NODE_ENV.items() if k != "MASTER_PORT"}).master_port == DEFAULT_PORT
    )


@pytest.mark.parametrize(
    "left",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2"},  # no MASTER_ADDR: unusable
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"},
        {"PET_NNODES": "1", "TORCHELASTIC_RUN_ID": "x"},
        {"LOCAL_RANK": "0", "MASTER_PORT": "29500"},
    ],
)
def test_leftover_variables_are_reported_and_not_followed(left: dict[str, str]) -> None:
    place = find(left | {"HOME": "/root"})
    assert (place.kind, place.leftovers) == (LOCAL, tuple(sorted(left)))
    assert topology.clean(left | {"HOME": "/root"}) == {"HOME": "/root"}


def test_slurm_task_for_each_rank() -> None:
    for script in (True, False):
        place = find(STEP, script=script)
        assert (
            place.kind,
            place.source,
            place.rank,
            place.local_rank,
            place.world_size,
            place.local_world_size,
        ) == (
            RANK,
            "slurm",
            1,
            1,
            2,
            2,
        )
        assert place.variables() == {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(slurm_env.port(STEP)),
        }


def test_slurm_batch_script_and_single_task_are_local() -> None:
    batch = {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert find(batch).kind == LOCAL, "a batch script has SLURM_PROCID and SLURM_NTASKS too"
    assert find(STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).kind == LOCAL, "srun --pty bash"


def scontrol(folder: Path, node_known: bool = True) -> None:
    """A scontrol that answers like SLURM's: host names of a list, the address of a node."""
    tool = folder / "scontrol"
    answer = "echo '   NodeAddr=10.1.2.3 NodeHostName=n4 Version=22.05'" if node_known else "exit 1"
    tool.write_text(f"#!/bin/sh\n[ $2 = hostnames ] && printf 'n4\\nn5\\n' && exit\n{answer}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("known", [True, False])
def test_slurm_task_for_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    scontrol(tmp_path, known)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nodes = STEP | {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n[4-5]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    place = find(nodes)
    address = "10.1.2.3" if known else "n4"
    assert (place.kind, place.node_rank, place.nnodes, place.master_addr) == (NODE, 1, 2, address)
    assert find(nodes, script=False).kind == RANK, (
        "train.py with a GPU or none: the task is the rank"
    )
    assert find(nodes, script=False, gpus=True).kind == NODE, "train.py with a whole node"
    assert find(nodes, master_addr="login").master_addr == "login"


@pytest.mark.parametrize(
    ("words", "node", "here"),
    [("2(x3),1", "3", 1), ("2(x3),1", "2", 2), ("4", "0", 4), ("", "0", 0), ("2", "9", 0)],
)
def test_tasks_of_a_node(words: str, node: str, here: int) -> None:
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": words, "SLURM_NODEID": node}
    assert find(environ).local_world_size == (here or 2), "one node: all tasks are local"


def test_slurm_ports_differ_by_job_and_step() -> None:
    ports = {
        slurm_env.port(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in (7, 8)
        for step in (0, 1)
    }
    assert len(ports) == 4 and all(port in slurm_env.PORTS for port in ports)


def test_precedence_torchrun_platform_slurm() -> None:
    assert find(STEP | RANK_ENV).source == "platform"
    assert find(STEP | RANK_ENV | {"TORCHELASTIC_RUN_ID": "x"}).source == "torchrun"


def test_several_machines_by_flags() -> None:
    place = find({}, nnodes=2, node_rank=1, master_addr="a")
    assert (place.kind, place.source, place.node_rank, place.master_port) == (
        NODE,
        "flags",
        1,
        DEFAULT_PORT,
    )
    assert (
        place.sentence()
        == f"mode node 1 of 2, the first is a:{DEFAULT_PORT}: 2 machines (--nnodes)"
    )
    assert find({}, nnodes=2, master_addr="a", master_port=5).master_port == 5


def test_incomplete_flags() -> None:
    text = problems({}, nnodes=2, node_rank=2)
    assert (
        "nnodes is 2, but master_addr is not given" in text
        and "node_rank is 2, but nnodes is 2" in text
    )


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_launcher_overrides_the_environment(launcher: str) -> None:
    place = find(RANK_ENV, launcher=launcher)
    assert (place.kind, place.leftovers) == (LOCAL, tuple(sorted(RANK_ENV)))
    assert place.sentence() == f"mode local: as asked (--launcher={launcher})"


def test_launcher_env_and_slurm() -> None:
    assert find(STEP | RANK_ENV, launcher="slurm").source == "slurm"
    assert find(STEP | RANK_ENV, launcher="env").rank == 3
    assert (
        problems({}, launcher="env")[0] == "RANK is '' (environment), but as asked (--launcher=env)"
    )
    assert "SLURM_PROCID is ''" in problems({}, launcher="slurm")[0]


def test_invalid_variables_are_refused_with_a_fix() -> None:
    text = problems(RANK_ENV | {"RANK": "4"})
    assert (
        text[0] == "RANK is 4 (environment), but WORLD_SIZE is 4" and "--launcher=spawn" in text[-1]
    )
    assert problems(RANK_ENV | {"LOCAL_RANK": "one"})[0].startswith(
        "LOCAL_RANK is 'one' (environment)"
    )
    assert (
        "MASTER_PORT is missing"
        in problems({k: v for k, v in RANK_ENV.items() if k != "MASTER_PORT"})[0]
    )
    assert problems(NODE_ENV | {"RANK": "2"})[0] == "RANK is 2 (environment), but WORLD_SIZE is 2"


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local_rank, local_size)
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)}


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpirun_with_a_process_for_each_rank() -> None:
    for environ in (open_mpi(1, 2, 1, 2), HYDRA):
        place = find(environ)
        assert (place.kind, place.source, place.rank, place.local_rank) == (RANK, "mpi", 1, 1)
        assert (place.world_size, place.local_world_size) == (2, 2)
        assert (place.master_addr, place.master_port) == ("127.0.0.1", DEFAULT_PORT)
    job = {"PMIX_NAMESPACE": "4711"}
    ports = {find(open_mpi(rank, 2, rank, 2) | job).master_port for rank in (0, 1)}
    assert len(ports) == 1 and ports <= set(slurm_env.PORTS), "known to all processes of a job"
    several = open_mpi(2, 4, 0, 2)
    place = find(several | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2000"})
    assert (place.kind, place.master_addr, place.master_port) == (RANK, "10.0.0.1", 2000)
    assert find(several, master_addr="h", master_port=3).variables()["MASTER_ADDR"] == "h"
    # variables of a step that srun has started for mpirun's own daemons
    assert find(STEP | open_mpi(0, 2, 0, 2)).source == "mpi"


def test_mpirun_with_a_process_for_each_machine() -> None:
    environ = open_mpi(1, 2, 0, 1) | {"MASTER_ADDR": "10.0.0.1"}
    place = find(environ)
    assert (place.kind, place.source, place.node_rank, place.nnodes) == (NODE, "mpi", 1, 2)
    assert find(environ, script=False).kind == RANK, "train.py starts no ranks"
    assert find(environ, script=False, gpus=True).kind == NODE
    with pytest.raises(UserError) as caught:
        find(open_mpi(1, 2, 0, 1))
    assert [problem.code for problem in caught.value.problems] == ["environment.no_master_addr"]


@pytest.mark.parametrize(
    "left",
    [
        open_mpi(0, 1, 0, 1),
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},  # of srun
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"JOB_COMPLETION_INDEX": "1"},
    ],
)
def test_one_process_or_incomplete_variables_are_not_followed(left: dict[str, str]) -> None:
    assert find(left).kind == LOCAL
    assert find(open_mpi(1, 2, 0, 1), launcher="spawn").kind == LOCAL


# as the training operator sets them: WORLD_SIZE is nodes × nprocPerNode
PYTORCHJOB = {
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "16",
    "RANK": "1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
}


def test_nodes_of_kubeflow() -> None:
    place = find(PYTORCHJOB)
    assert (place.kind, place.nnodes, place.node_rank) == (NODE, 2, 1)
    assert (place.master_addr, place.master_port) == ("train-master-0", 23456)
    alone = PYTORCHJOB | {"PET_NNODES": "1", "RANK": "0", "PET_NODE_RANK": "0", "WORLD_SIZE": "8"}
    assert find(alone).kind == LOCAL
    trainer = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "t-node-0-0.t"}
    place = find(trainer | {"PET_MASTER_PORT": "29400"})
    assert (place.node_rank, place.master_addr, place.master_port) == (0, "t-node-0-0.t", 29400)
    assert find(RANK_ENV | trainer).kind == RANK, "a rank that has been started already"
    assert "PET_NNODES" in problems(trainer | {"PET_NODE_RANK": "2"})[0]


@pytest.mark.parametrize(
    ("pod", "lacking", "fix"),
    [
        (
            {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:29400"},
            ["PET_NODE_RANK", "PET_MASTER_ADDR"],
            "--nnodes=2 --node_rank=N --master_addr=h",
        ),
        ({"PET_NNODES": "2:4", "MASTER_ADDR": "h"}, ["PET_NODE_RANK"], "--nnodes=4 --node_rank=N"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, ["PET_MASTER_ADDR"], "--node_rank=1"),
    ],
)
def test_a_pod_without_number_or_address_does_not_train_alone(
    pod: dict[str, str], lacking: list[str], fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        find(pod)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.code) == ("environment.rank_missing", Exit.CONFIG)
    names = ("PET_NODE_RANK", "PET_MASTER_ADDR")
    assert [name for name in names if name in problem.what] == lacking
    assert any(fix in one for one in problem.fixes)
    assert find(pod, launcher="spawn").kind == LOCAL
    place = find(pod, nnodes=2, node_rank=1, master_addr="h")
    assert (place.kind, place.node_rank, place.master_addr) == (NODE, 1, "h")


def test_an_elastic_range_counts_the_most_machines() -> None:
    assert find(PYTORCHJOB | {"PET_NNODES": "2:4"}).nnodes == 4
    place = find({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, master_addr="h")
    assert (place.kind, place.node_rank, place.master_addr) == (NODE, 1, "h")


def test_nodes_of_skypilot() -> None:
    environ = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1"}
    place = find(environ)
    assert (place.kind, place.nnodes, place.node_rank) == (NODE, 2, 1)
    assert (place.master_addr, place.master_port) == ("10.0.0.1", DEFAULT_PORT)
    assert find(environ, master_addr="h", master_port=7).master_port == 7


def test_pods_of_an_indexed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"JOB_COMPLETION_INDEX": "1"}
    monkeypatch.setattr("socket.gethostname", lambda: "gpt-workers-0-1")
    monkeypatch.setattr("socket.getfqdn", lambda: "gpt-workers-0-1.gpt.default.svc.cluster.local")
    place = find(environ, nnodes=2)
    assert (place.kind, place.nnodes, place.node_rank) == (NODE, 2, 1)
    assert place.master_addr == "gpt-workers-0-0.gpt.default.svc.cluster.local"
    assert find(environ | {"MASTER_ADDR": "m"}, nnodes=2).master_addr == "m"
    assert "JOB_COMPLETION_INDEX" in problems({"JOB_COMPLETION_INDEX": "2"}, nnodes=2)[0]
    # a pod in the network of its machine
    monkeypatch.setattr("socket.gethostname", lambda: "machine7")
    monkeypatch.setattr("socket.getfqdn", lambda: "machine7")
    names = {"JOBSET_NAME": "gpt", "REPLICATED_JOB_NAME": "workers"}
    assert find(environ | names, nnodes=2).master_addr == "gpt-workers-0-0.gpt"
    with pytest.raises(UserError) as caught:
        find(environ, nnodes=2)
    assert [problem.code for problem in caught.value.problems] == ["environment.no_master_addr"]
