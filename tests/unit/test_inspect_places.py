"""Which rank computes on which GPU: real processes, and the stand-in for NVIDIA's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit import targets
from tests.unit.conftest import ROOT, clean_environment
from training.core.rundir import RunDir
from training.host.gpus import Gpu, GpuInventory, GpuProcess
from training.monitor.health import gpu_placement
from training.monitor.health.check import BAD, OK, UNKNOWN, HealthCheck
from training.monitor.health.target import Target

Nvidia = Callable[..., dict[str, Any]]
# As the command, with a shorter look.
QUICKLY = (
    "import sys; from training.cli import inspect; from training.monitor.health import activity;"
    "activity.LOOK_S = activity.MORE_S = 0.5; sys.exit(inspect.main(sys.argv[1:]))"
)
POWER = {"USE": "97,96", "POWER": "431,425", "POWER_LIMIT": "575"}


def inspect(pid: int, environment: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(exit status, everything, the check of the GPUs)."""
    env = clean_environment() | {k: v for k, v in environment.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", QUICKLY, f"--pid={pid}", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "", done.stderr
    told = json.loads(done.stdout)
    return done.returncode, told, next(c for c in told["checks"] if c["name"] == "GPUs")


def test_a_gpu_for_each_rank(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, told, gpus = inspect(
            pids[1], nvidia(PROCESSES=f"{pids[0]}:21.5;{pids[1]}:20", **POWER)
        )
    assert code == 0 and told["text"] == "YES: all 2 ranks are at work", told
    text = "a GPU for each rank: rank 0 on GPU 0 (97 %, 431 W); rank 1 on GPU 1 (96 %, 425 W)"
    assert gpus == {"name": "GPUs", "status": "ok", "text": text, "ranks": []}
    assert [(r["gpu"], r["gpu_memory_bytes"] >> 30) for r in told["ranks"]] == [(0, 21), (1, 20)]


def test_two_ranks_on_one_gpu(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        processes = f"{pids[0]}:21.5,{pids[1]}:20"
        code, told, gpus = inspect(pids[0], nvidia(PROCESSES=processes))
        assert (
            code == 5
            and told["text"] == "NO: ranks 0 and 1 compute on the same GPU 0, GPU 1 has no rank"
        )
        assert gpus["status"] == "bad" and gpus["ranks"] == [0, 1]
        # there is no other
        code, told, gpus = inspect(pids[0], nvidia(PROCESSES=processes, COUNT=1))
        assert code == 0 and gpus["status"] == "warn", told


def test_a_rank_without_a_gpu(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, told, gpus = inspect(pids[0], nvidia(PROCESSES=f"{pids[0]}:21.5"))
    assert (
        code == 5
        and told["text"] == "NO: rank 1 has no process on a GPU, GPU 1 has no process of it"
        and gpus["ranks"] == [1]
    )


def test_ranks_on_each_other_s_gpus(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        code, told, gpus = inspect(pids[0], nvidia(PROCESSES=f"{pids[1]}:21.5;{pids[0]}:21.5"))
    assert code == 0 and gpus["status"] == "warn", told
    assert gpus["text"].startswith(
        "rank 0 computes on GPU 1, its own by LOCAL_RANK and CUDA_VISIBLE_DEVICES is GPU 0: "
    )
    assert told["text"] == "YES: all 2 ranks are at work; 1 to look at: GPUs"


def test_a_second_context_and_a_stranger(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        processes = f"{pids[0]}:21.5,{pids[1]}:0.5;{pids[1]}:21,{os.getppid()}:3"
        code, _, gpus = inspect(pids[0], nvidia(PROCESSES=processes))
    assert code == 0 and gpus["status"] == "warn" and gpus["ranks"] == [1]
    assert (
        "; rank 1 holds 0.5 GiB of GPU 0 too (torch.cuda.set_device comes too late?); GPU 1: a "
        "process of " in gpus["text"]
    )
    assert gpus["text"].endswith(f"that is not of this training, pid {os.getppid()} with 3.0 GiB")


def test_the_driver_does_not_name_them(tmp_path: Path, nvidia: Nvidia) -> None:
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        host = "4194301:21.5;4194302:20"
        for values, status, text in (
            (
                {"PROCESSES": host},
                "unknown",
                "not known: the driver tells the host's process numbers, which are others in this "
                "container",
            ),
            (
                {"NOT_SUPPORTED": 1},
                "unknown",
                "not known: the driver does not tell which processes compute (MIG, an old driver)",
            ),
            ({}, "warn", "no rank uses a GPU, this machine has 2"),
            ({"INIT": 9}, "ok", "none: the NVIDIA driver does not answer: Driver Not Loaded"),
        ):
            code, _, gpus = inspect(pids[0], nvidia(**values))
            assert (code, gpus["status"], gpus["text"]) == (0, status, text)


def planned(*on: tuple[int, int], begun: bool = True) -> HealthCheck:
    """Of a run of ours on two GPUs, whose ranks 0 and 1 are the processes 4194300 and 4194301: `on`
    has (GPU, pid)."""
    held = {
        gpu: tuple(GpuProcess(pid, 20 << 30) for index, pid in on if index == gpu) for gpu in (0, 1)
    }
    cards = [
        Gpu(i, f"GPU-{i}", "a card", 32 << 30, 1 << 30, 97, 60, 400.0, processes=processes)
        for i, processes in held.items()
    ]
    pids, told = {0: 4194300, 1: 4194301}, {0: {"LOCAL_RANK": "0"}, 1: {"LOCAL_RANK": "1"}}
    plan = {"device": {"value": "cuda"}}
    target = Target(RunDir("a run"), plan, pids, 2, 2, "plan.json", told, ("GPU-0", "GPU-1"))
    return gpu_placement.check(target, GpuInventory(tuple(cards), "2 on this machine"), begun=begun)


def test_a_run_of_ours_is_held_to_its_plan() -> None:
    first, second = 4194300, 4194301
    assert planned((0, first), (1, second)).status == OK
    swapped = planned((1, first), (0, second))
    assert (swapped.status, swapped.said, swapped.ranks) == (
        BAD,
        "rank 0 computes on GPU 1, its own by the plan is GPU 0",
        (0, 1),
    )
    half = planned((0, first))
    assert (half.status, half.said) == (
        BAD,
        "rank 1 has no process on a GPU, GPU 1 has no process of it",
    )
    assert planned((0, first), begun=False).status == planned(begun=False).status == UNKNOWN, (
        "it is only starting"
    )
    nobody = planned()
    assert (nobody.status, nobody.said) == (BAD, "no rank has a process on a GPU, the plan has 2")
