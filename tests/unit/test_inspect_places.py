"""Placement of ranks on GPUs, with real processes and a stand-in for NVIDIA's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit import targets
from tests.unit.conftest import ROOT, clean_environment
from training.core.rundir import RunDir
from training.host.gpu_processes import GpuProcess
from training.host.gpus import Gpu, GpuInventory
from training.monitor import host_stats
from training.monitor.health import gpu_placement, health
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN, HealthCheck
from training.monitor.health.target import Target

Nvidia = Callable[..., dict[str, Any]]
# The command with a shorter observation.
QUICKLY = (
    "import sys; from training.cli import inspect; from training.monitor.health import activity;"
    "activity.LOOK_S = activity.MORE_S = 0.5; sys.exit(inspect.main(sys.argv[1:]))"
)
POWER = {"USE": "97,96", "POWER": "431,425", "POWER_LIMIT": "575"}


def inspect(pid: int, environment: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(exit status, JSON, its check of the GPUs)."""
    env = clean_environment() | {"FAKE_NVML_NAME": "two of a kind"}
    env |= {k: v for k, v in environment.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", QUICKLY, f"--pid={pid}", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "", done.stderr
    shown = json.loads(done.stdout)
    return done.returncode, shown, next(c for c in shown["checks"] if c["name"] == "GPUs")


def test_a_gpu_for_each_rank(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, shown, gpus = inspect(
            pids[1], nvidia(PROCESSES=f"{pids[0]}:21.5;{pids[1]}:20", **POWER)
        )
    assert code == 0 and shown["text"] == "YES: all 2 ranks are at work", shown
    text = "a GPU for each rank: rank 0 on GPU 0 (97 %, 431 W); rank 1 on GPU 1 (96 %, 425 W)"
    assert gpus == {"name": "GPUs", "status": "ok", "text": text, "ranks": []}
    assert [(r["gpu"], r["gpu_memory_bytes"] >> 30) for r in shown["ranks"]] == [(0, 21), (1, 20)]


def test_two_ranks_on_one_gpu(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        processes = f"{pids[0]}:21.5,{pids[1]}:20"
        code, shown, gpus = inspect(pids[0], nvidia(PROCESSES=processes))
        assert (
            code == 5
            and shown["text"] == "NO: ranks 0 and 1 compute on the same GPU 0, no rank uses GPU 1"
        )
        assert gpus["status"] == "bad" and gpus["ranks"] == [0, 1]
        # the only GPU
        code, shown, gpus = inspect(pids[0], nvidia(PROCESSES=processes, COUNT=1))
        assert code == 0 and gpus["status"] == "warn", shown


def test_rank_without_a_gpu(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, shown, gpus = inspect(pids[0], nvidia(PROCESSES=f"{pids[0]}:21.5"))
    assert (
        code == 5
        and shown["text"] == "NO: rank 1 has no process on a GPU, no rank uses GPU 1"
        and gpus["ranks"] == [1]
    )


def test_rank_that_prepares_data_before_it_uses_a_gpu(tmp_path: Path, nvidia: Nvidia) -> None:
    """The others wait for it, on their GPUs."""
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        code, _, gpus = inspect(pids[0], nvidia(PROCESSES=f";{pids[1]}:0.5"))
    assert (code, gpus["status"], gpus["ranks"]) == (3, "unknown", [0])


def test_swapped_gpus(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, shown, gpus = inspect(pids[0], nvidia(PROCESSES=f"{pids[1]}:21.5;{pids[0]}:21.5"))
    assert code == 0 and gpus["status"] == "warn", shown
    assert gpus["text"].startswith(
        "rank 0 computes on GPU 1, but LOCAL_RANK and CUDA_VISIBLE_DEVICES select GPU 0: "
    )
    assert shown["text"] == "YES: all 2 ranks are at work; 1 warning: GPUs"


def test_second_context_and_another_process(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        processes = f"{pids[0]}:21.5,{pids[1]}:0.5;{pids[1]}:21,{os.getppid()}:3"
        code, _, gpus = inspect(pids[0], nvidia(PROCESSES=processes))
    assert code == 0 and gpus["status"] == "warn" and gpus["ranks"] == [1]
    assert (
        "; rank 1 also holds 0.5 GiB on GPU 0 (torch.cuda.set_device called too late?); GPU 1: "
        "another process of user " in gpus["text"]
    )
    assert gpus["text"].endswith(f", pid {os.getppid()} with 3.0 GiB")


def test_driver_does_not_list_the_processes(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        host = "4194301:21.5;4194302:20"
        for values, status, text in (
            (
                {"PROCESSES": host},
                "unknown",
                "unknown: the driver reports the host's pids, which differ in this container",
            ),
            (
                {"NOT_SUPPORTED": 1},
                "unknown",
                "unknown: the driver does not list processes (MIG, or an old driver)",
            ),
            ({}, "warn", "no rank uses a GPU, but this machine has 2"),
            ({"INIT": 9}, "ok", "none: the NVIDIA driver does not answer: Driver Not Loaded"),
        ):
            code, _, gpus = inspect(pids[0], nvidia(**values))
            assert (code, gpus["status"], gpus["text"]) == (0, status, text)


def planned(*on: tuple[int, int], begun: bool = True, command: str = "-") -> HealthCheck:
    """Check of a run on two GPUs whose ranks 0 and 1 are the processes 4194300 and 4194301. `on`:
    (GPU, pid) of each process on a GPU; `command`: of them all."""
    held = {
        gpu: tuple(GpuProcess(pid, 20 << 30, command=command) for index, pid in on if index == gpu)
        for gpu in (0, 1)
    }
    cards = [
        Gpu(i, f"GPU-{i}", "a card", 32 << 30, 1 << 30, 97, 60, 400.0, processes=processes)
        for i, processes in held.items()
    ]
    pids, variables = {0: 4194300, 1: 4194301}, {0: {"LOCAL_RANK": "0"}, 1: {"LOCAL_RANK": "1"}}
    plan = {"device": {"value": "cuda"}}
    target = Target(RunDir("a run"), plan, pids, 2, 2, "plan.json", variables, ("GPU-0", "GPU-1"))
    return gpu_placement.check(target, GpuInventory(tuple(cards), "2 on this machine"), begun=begun)


def test_gpus_are_distinguished_by_their_uuids() -> None:
    """Instances (MIG) of one GPU have the same index, and a plan may have another one for a GPU."""
    pids, variables = {0: 4194300, 1: 4194301}, {0: {"LOCAL_RANK": "0"}, 1: {"LOCAL_RANK": "1"}}

    def looked(*cards: tuple[int, str], planned: tuple[str, ...]) -> tuple[HealthCheck, Any, Any]:
        gpus = tuple(
            Gpu(index, uuid, "a card", 8 << 30, 1 << 30, None, 60, None,
                processes=(GpuProcess(pid, (rank + 1) << 30),))
            for (index, uuid), (rank, pid) in zip(cards, pids.items(), strict=True)
        )  # fmt: skip
        run, seen = RunDir("a run"), GpuInventory(gpus, "2 on this machine")
        target = Target(run, {"device": {"value": "cuda"}}, pids, 2, 2, "", variables, planned)
        places = gpu_placement.find_placement(target, seen)
        wanted = gpu_placement.expected(target, seen)
        return gpu_placement.check(target, seen, begun=True), places, wanted

    parts = ("MIG-a", "MIG-b")
    check, places, wanted = looked((0, "MIG-a"), (0, "MIG-b"), planned=parts)
    assert (check.status, wanted) == (OK, {0: "MIG-a", 1: "MIG-b"})
    assert places == {0: {"MIG-a": 1 << 30}, 1: {"MIG-b": 2 << 30}}
    check, _, wanted = looked((4, "GPU-x"), (1, "GPU-y"), planned=("GPU-y", "GPU-x"))
    assert (check.status, wanted) == (BAD, {0: "GPU-y", 1: "GPU-x"})
    check, places, wanted = looked((0, "-"), (1, "-"), planned=("-", "-"))  # by index
    assert (check.status, wanted, {*places[1]}) == (OK, {}, {"1"})


ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"


@each(
    ("second", "variables", "wanted"),
    [
        ("a fast card", {}, {}),
        ("a fast card", {VISIBLE: "1,0"}, {}),
        ("a fast card", {ORDER: "FASTEST_FIRST"}, {}),
        ("a fast card", {ORDER: "PCI_BUS_ID"}, {0: "GPU-0", 1: "GPU-1"}),
        ("a fast card", {VISIBLE: "GPU-1,GPU-0"}, {0: "GPU-1", 1: "GPU-0"}),
        ("a card", {VISIBLE: "1,0"}, {0: "GPU-1", 1: "GPU-0"}),
    ],
)
def test_different_gpus_are_numbered_by_speed(
    second: str, variables: dict[str, str], wanted: dict[int, str]
) -> None:
    """By CUDA, unless CUDA_DEVICE_ORDER is set: the GPU of a number is unknown then."""
    pids = {0: 4194300, 1: 4194301}
    gpus = tuple(
        Gpu(index, f"GPU-{index}", name, 32 << 30, 1 << 30, 97, 60, 400.0,
            processes=(GpuProcess(pids[1 - index], 20 << 30),))
        for index, name in enumerate(("a card", second))
    )  # fmt: skip
    known = {rank: {"LOCAL_RANK": str(rank), **variables} for rank in pids}
    target, seen = Target(None, {}, pids, 2, 2, "", known), GpuInventory(gpus, "2 on this machine")
    assert gpu_placement.expected(target, seen) == wanted
    on = {rank: f"GPU-{1 - rank}" for rank in pids}
    assert gpu_placement.check(target, seen, begun=True).status == (
        OK if wanted in ({}, on) else WARN
    )


def test_instances_that_the_ranks_of_a_script_name_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else both have their processes on the same GPU."""

    class Asked(Exception):
        pass

    def ask(shared: host_stats.Shared, planned: Iterable[str] = ()) -> None:
        raise Asked(*planned)

    monkeypatch.setattr(host_stats.Shared, "ask", ask)
    names = {0: {"CUDA_VISIBLE_DEVICES": "MIG-a"}, 1: {"CUDA_VISIBLE_DEVICES": "MIG-b"}}
    target = Target(None, {}, {0: 4194300, 1: 4194301}, 2, 2, "", names)
    monkeypatch.setattr(health.target, "of_process", lambda pid: target)
    with pytest.raises(Asked) as asked:
        health.of_process(4194300)
    assert asked.value.args == ("MIG-a", "MIG-b")


def test_run_is_compared_with_its_plan() -> None:
    first, second = 4194300, 4194301
    assert planned((0, first), (1, second)).status == OK
    other = (0, first), (1, second), (1, 4194302)
    assert planned(*other).status == WARN
    assert planned(*other, command="nvidia-cuda-mps-server").status == OK
    swapped = planned((1, first), (0, second))
    assert (swapped.status, swapped.shown_headline, swapped.ranks) == (
        BAD,
        "rank 0 computes on GPU 1, but the plan assigns GPU 0",
        (0, 1),
    )
    half = planned((0, first))
    assert (half.status, half.shown_headline) == (
        BAD,
        "rank 1 has no process on a GPU, no rank uses GPU 1",
    )
    assert planned((0, first), begun=False).status == planned(begun=False).status == UNKNOWN, (
        "still starting"
    )
    empty = planned()
    assert (empty.status, empty.shown_headline) == (
        BAD,
        "no rank has a process on a GPU, but the plan has 2 GPUs",
    )
