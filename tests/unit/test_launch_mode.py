"""Place of a process in a job: started by hand, torchrun, a platform or SLURM; precedence, and
refusals."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.unit.launch_places import RANK_ENV, STEP, find, problems
from training.host import ports, slurm_env, topology
from training.host.placement import DEFAULT_PORT, LOCAL, NODE, RANK

NODE_ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2000"}


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


def test_flags_override_the_address_that_a_platform_injects() -> None:
    place = find(NODE_ENV, master_addr="h", master_port=3)
    assert (place.kind, place.master_addr, place.master_port) == (NODE, "h", 3)


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


@pytest.mark.parametrize("script", [True, False])
def test_tasks_with_rank_but_no_local_rank_are_ranks(script: bool) -> None:
    """`srun bash -c 'RANK=$SLURM_PROCID …'`: twice as many ranks would share the GPUs."""
    step = STEP | {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "2"}
    exported = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n4-ib0", "MASTER_PORT": "2000"}
    place = find(step | exported, script=script, gpus=True)
    assert (place.kind, place.rank, place.local_rank, place.world_size) == (RANK, 3, 1, 4)
    assert (place.master_addr, place.master_port) == ("n4-ib0", 2000)
    assert find(step | exported, script=script, master_addr="h").master_addr == "h"
    other_order = step | exported | {"SLURM_PROCID": "0"}
    assert find(other_order, script=script).rank == 3, "that of MASTER_ADDR is 0"
    one_each = {"SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0"}
    assert find(step | exported | one_each, script=script).kind == NODE


def test_the_interactive_shell_of_salloc_is_local() -> None:
    """The variables of `srun --interactive --preserve-env --pty`, with which SLURM starts it."""
    shell = STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    shell |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for nodes in ("1", "2"):
        allocation = {"SLURM_NTASKS": "2", "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
        assert find(shell | allocation).kind == LOCAL
    place = find(shell, launcher="slurm")
    assert (place.kind, place.rank, place.world_size, place.local_world_size) == (RANK, 0, 1, 1)


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
    used = {
        slurm_env.port(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in (7, 8)
        for step in (0, 1)
    }
    assert len(used) == 4 and all(port in ports.QUIET for port in used)


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
