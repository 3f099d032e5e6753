"""GPUs that fall off the bus during a run with --min_ranks, and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launched, Launcher
from tests.null_gpu.conftest import NullGpus
from training.core.rundir import read_json, read_records
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

pytestmark = pytest.mark.timeout(1800)
Train = Callable[..., Launched]
LIMIT_S = 300  # four ranks import the CUDA build on two cores
LOST = 999  # CUDA's unknown error: the driver does not list the device any more
FLAGS = {
    "device_batch_size": 4,
    "total_batch_size": 1536,
    "save_every": 20,
    "num_iterations": 100_000,
    "log_every": 100,
    "min_ranks": 1,
}


def events(run: Launched, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_records(run.run.events) if r["event"] == kind]


def recovered(run: Launched, times: int) -> None:
    wait_until(
        lambda: len(events(run, "recovered")) == times or run.process.poll() is not None,
        LIMIT_S,
        "the restart",
    )
    assert run.process.poll() is None, run.output[-4000:]


def plan(run: Launched) -> dict[str, Any]:
    return read_json(run.run.plan) or {}


def gpus_of(run: Launched) -> list[int]:
    return [gpu["index"] for gpu in plan(run)["gpus"]]


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        (3, 1),
        *(
            pytest.param(ranks, lost, marks=pytest.mark.soak)
            for ranks, lost in ((2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (4, 3))
        ),
    ],
)
def test_a_lost_gpu_is_left_out_and_used_again(
    train: Train, gpus: NullGpus, ranks: int, lost: int
) -> None:
    run = train(ranks=ranks, **FLAGS)
    wait_until(lambda: events(run, "checkpoint"), LIMIT_S, "a checkpoint")
    gpus.break_down(lost, LOST)
    recovered(run, 1)
    (restart,) = events(run, "restart")
    assert (restart["cause"], restart["ranks"]) == ("gpu_hardware", [ranks, ranks - 1])
    assert [(one["seat"], one["gpu"]) for one in restart["lost"]] == [(lost, lost)]
    assert gpus_of(run) == [n for n in range(ranks) if n != lost]
    gpus.repair(lost)
    recovered(run, 2)
    _, second = events(run, "restart")
    assert (second["cause"], second["back"]) == ("none", [lost])
    assert second["steps_lost"] == 0, "they have saved before they exited"
    assert gpus_of(run) == list(range(ranks)) and plan(run)["elastic"]["lost"] == []
    # lost again, it is not tested again
    gpus.break_down(lost, LOST)
    recovered(run, 3)
    gpus.repair(lost)
    saved = len(events(run, "checkpoint"))
    wait_until(lambda: len(events(run, "checkpoint")) > saved + 2, LIMIT_S, "more checkpoints")
    assert len(events(run, "restart")) == 3
    run.process.terminate()
    assert run.wait() == 75
    steps = [r["step"] for r in read_records(run.run.metrics) if "loss" in r]
    assert sorted(set(steps)) == list(range(1, run.summary["steps"] + 1)), "none is left out"


@pytest.mark.parametrize("lost", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_on_several_machines_each_tests_its_own_gpus(
    train: Train, gpus: NullGpus, tmp_path: Path, lost: int
) -> None:
    """Two machines with two GPUs each."""
    port = free_port(LOOPBACK)

    def start(node: int) -> Launched:
        place = {"nnodes": 2, "node_rank": node, "master_addr": LOOPBACK, "master_port": port}
        four = {"NULL_GPU_COUNT": "4", "FAKE_NVML_COUNT": "4"}
        own = {"CUDA_VISIBLE_DEVICES": f"{2 * node},{2 * node + 1}"}
        logs = tmp_path / f"logs{node}"
        return train(env=four | own, name="both", **FLAGS | place | {"log_dir": logs})

    run, other = start(0), start(1)
    wait_until(lambda: events(run, "checkpoint"), LIMIT_S, "a checkpoint")
    gpus.break_down(lost, LOST)
    recovered(run, 1)
    (restart,) = events(run, "restart")
    assert (restart["cause"], restart["ranks"]) == ("gpu_hardware", [4, 3])
    gpus.repair(lost)
    recovered(run, 2)
    _, second = events(run, "restart")
    assert (second["cause"], second["back"], second["ranks"]) == ("none", [lost], [3, 4])
    assert second["steps_lost"] == 0, "they have saved before they exited"
    assert plan(run)["elastic"]["lost"] == []
    run.process.terminate()
    assert (run.wait(), other.wait()) == (75, 75)


SCRIPT = """
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
number = torch.ones(8, device="cuda")
print("starts with", dist.get_world_size(), flush=True)
for step in range(100_000):
    dist.all_reduce(number)
    torch.cuda.synchronize()
    if dist.get_rank() == 0 and step % 2000 == 0:  # every 100 s: it is ended in a pause of 30 s
        torch.save({"step": step}, "snapshot.tmp")
        os.replace("snapshot.tmp", "snapshot.pt")
    time.sleep(0.05)
"""


@pytest.mark.soak
def test_a_script_gets_its_gpu_back_after_a_snapshot(
    gpus: NullGpus, project: Path, tmp_path: Path, token: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    folders = {"out_dir": tmp_path / "experiments", "log_dir": tmp_path / "logs"}
    words = [f"--{k}={v}" for k, v in (folders | {"run_name": "script", "min_ranks": 1}).items()]
    command = (str(project / "launch_train.sh"), "2", *words, "--script", "script.py")
    launch = Launcher(project, tmp_path, token)
    environ = gpus.environ | {"NULL_GPU_COUNT": "2", "FAKE_NVML_COUNT": "2"}
    run = launch(*command, name="script", bare=True, env=environ, cwd=tmp_path)
    run.wait_for("starts with 2")
    gpus.break_down(1, LOST)
    run.wait_for("starts with 1")
    gpus.repair(1)
    wait_until(lambda: run.output.count("starts with 2") == 2, LIMIT_S, "both GPUs")
    _, second = events(run, "restart")
    assert (second["cause"], second["back"], second["ranks"]) == ("none", [1], [1, 2])
    run.process.terminate()
    assert run.wait() == 75
