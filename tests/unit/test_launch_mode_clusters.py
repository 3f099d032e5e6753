"""Place of a process in a job of mpirun, Kubeflow, SkyPilot or a Kubernetes Indexed Job."""

from __future__ import annotations

import pytest

from tests.unit.launch_places import RANK_ENV, STEP, find, problems
from training.core.errors import Exit, UserError
from training.host import mpi_env, ports
from training.host.placement import DEFAULT_PORT, LOCAL, NODE, RANK


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local_rank, local_size)
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)}


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpirun_with_a_process_for_each_rank() -> None:
    mvapich = {n.replace("OMPI", "MV2"): v for n, v in open_mpi(1, 2, 1, 2).items()}
    pals = {n.replace("OMPI_COMM_WORLD", "PMI"): v for n, v in open_mpi(1, 2, 1, 2).items()}
    for environ in (open_mpi(1, 2, 1, 2), HYDRA, mvapich, pals):
        place = find(environ)
        assert (place.kind, place.source, place.rank, place.local_rank) == (RANK, "mpi", 1, 1)
        assert (place.world_size, place.local_world_size) == (2, 2)
        assert (place.master_addr, place.master_port) == ("127.0.0.1", DEFAULT_PORT)
        assert mpi_env.unbound(environ)
    job = {"PMIX_NAMESPACE": "4711"}
    used = {find(open_mpi(rank, 2, rank, 2) | job).master_port for rank in (0, 1)}
    assert len(used) == 1 and used <= set(ports.QUIET), "known to all processes of a job"
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


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize(
    ("nodes", "kind"),
    [("2", RANK), ("3", NODE), ("4", NODE), ("", NODE)],
    ids=["2", "3", "with an unused one", "unknown"],
)
def test_mpirun_with_machines_of_different_sizes_starts_ranks(
    nodes: str, kind: str, script: bool
) -> None:
    """The last of three processes, alone on its machine as well if there are three machines."""
    environ = open_mpi(2, 3, 0, 1) | {"MASTER_ADDR": "h", "OMPI_MCA_orte_num_nodes": nodes}
    assert find(environ, script=script, gpus=True).kind == kind
    assert find(environ | open_mpi(1, 3, 1, 2), script=script).kind == RANK


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
