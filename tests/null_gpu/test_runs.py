"""Whole runs on two null GPUs: real CUDA build of torch, NCCL process group, shell and supervisor.
Numbers are zeros, so losses mean nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import wait_until
from tests.e2e.conftest import Launched
from tests.null_gpu.conftest import NullGpus
from training.core.rundir import read_json, read_records
from training.launcher.communication.stages import LIMIT_S

Train = Callable[..., Launched]


def test_evaluation_checkpoint_and_resume(train: Train) -> None:
    run = train(eval_every=4, save_every=4, num_iterations=8, name="whole").ok()
    plan = read_json(run.run.plan) or {}
    assert plan["device"]["value"] == "cuda" and plan["precision"]["value"] == "bf16"
    assert sorted(run.steps) == list(range(1, 9))
    assert [r["step"] for r in read_records(run.run.metrics) if "eval_ms" in r] == [4, 8]
    memory = run.steps[8]["memory_bytes"]
    assert all(0 < used < 1 << 30 for used in memory), memory
    resumed = train(resume="whole", num_iterations=12).ok()
    assert resumed.summary["steps"] == 12 and resumed.summary["begun_at"] == 8


def test_all_ranks_stop_after_the_same_step(train: Train) -> None:
    run = train(num_iterations=100_000, log_every=100)
    run.wait_for("Iter: 1,")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    step = run.summary["steps"]
    assert step > 1 and max(run.steps) == step, "the steps in flight are recorded and saved"
    assert (run.run.checkpoints / f"step_{step:08d}").is_dir()


def test_out_of_memory_takes_a_smaller_batch(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=12, retries=2)
    wait_until(lambda: gpus.state.exists() and run.pids, 60, "the ranks")
    for device in (0, 1):
        gpus.occupy(device, 22.825)  # another program takes all but 3 MiB after the plan
    run.wait_for("device_batch_size 4 → 2")
    for device in (0, 1):
        gpus.occupy(device, 0)
    run.ok()
    assert run.summary["steps"] == 12
    (restart,) = [e for e in read_records(run.run.events) if e["event"] == "restart"]
    assert restart["changes"] == {"device_batch_size": [4, 2]}


def test_a_lost_gpu_is_named(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=100_000, log_every=100, retries=0)
    run.wait_for("Iter: 1,")
    gpus.break_down(1, 999)
    assert run.wait() == 4
    assert (run.failure["cause"], run.failure["rank"]) == ("gpu_hardware", 1)


def test_a_gpu_that_never_finishes_is_a_hang(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=100_000, log_every=100, hang_timeout=10, retries=0)
    run.wait_for("Iter: 1,")
    gpus.stall(1)
    assert run.wait() == 5
    # Which GPU is stuck is not known: all ranks wait for the same collective.
    assert (run.failure["cause"], run.failure["rank"]) == ("hang", None)


def test_gpus_that_hang_with_peer_to_peer_copies(
    train: Train, gpus: NullGpus, tmp_path: Path
) -> None:
    env = {"NULL_GPU_P2P_HANGS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = train(num_iterations=4, env=env)
    assert first.wait(240) == 0, first.output[-3000:]
    assert first.output.count("NCCL_P2P_DISABLE=1") >= 2, "the second attempt, and the run"
    begun = time.monotonic()
    second = train(num_iterations=4, env=env)
    second.wait_for("run directory: ")
    assert time.monotonic() - begun < LIMIT_S, "nothing is tested again"
    second.ok()
    for run in (first, second):
        plan = read_json(run.run.plan) or {}
        assert not plan["communication"]["p2p"] and plan["communication"]["gb_per_s"] > 0
        chosen = {v["name"]: v["value"] for v in plan["variables"]}
        assert chosen["NCCL_P2P_DISABLE"] == "1"
    assert plan["communication"]["time"] < plan["created"], "of the first start"
