"""Whole runs on two null GPUs: real CUDA build of torch, NCCL process group, shell and supervisor.
Numbers are zeros, so losses mean nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launched
from tests.null_gpu.conftest import NullGpus, duet
from training.core.messages import msg
from training.core.rundir import read_json, read_records
from training.core.units import plural
from training.launcher.communication.stages import LIMIT_S
from training.monitor.alerts import MEASURED_STEPS
from training.monitor.health.check import WARN

Train = Callable[..., Launched]
# A batch that stays partly on the CPU and comes partly from the GPU, ahead of its step, and data that
# fails where a training of three steps ends.
TASK = """
import torch
from torch import nn, zeros
from training.tasks.base import Task

class Data:
    read = 0
    def __len__(self):
        return 100
    def __getitem__(self, index):
        Data.read += 1
        assert Data.read <= 3 * 4, "a batch that no step needs"
        return zeros(8), index, zeros(1, device="cuda")

class Partly(Task):
    arrived = used = 0
    def model(self):
        return nn.Linear(8, 1)
    def train_data(self):
        return Data()
    def arrive(self, batch):
        Partly.arrived += 1
        assert torch.cuda.current_stream() != torch.cuda.default_stream(), "waits for the step"
        first, index, there = batch
        return super().arrive(first), index, super().arrive(there)
    def loss(self, model, batch):
        Partly.used += 1
        assert Partly.arrived == min(Partly.used + 1, 3), "the next one is under way"
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32 and not torch.backends.cudnn.benchmark
        assert batch[0].is_cuda and not batch[1].is_cuda and batch[2].is_cuda
        return model(batch[0]).mean()
"""


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


def test_a_run_on_the_cpu_has_no_context(train: Train, gpus: NullGpus) -> None:
    often = {"eval_every": 2, "save_every": 2, "sample_tokens": 4}
    run = train(device="cpu", num_iterations=4, ema=0.9, **often).ok()
    assert len(list(run.run.checkpoints.glob("step_*"))) == 2
    assert [gpus.all_processes(device) for device in (0, 1)] == [set(), set()]


@pytest.mark.timeout(900)
def test_the_rank_of_a_slow_gpu_is_named(train: Train, gpus: NullGpus, project: Path) -> None:
    run = train(num_iterations=100_000, log_every=100, save_every=0)
    wait_until(lambda: gpus.state.exists() and run.pids, 240, "the ranks")
    for device, kernel_us in enumerate((20, 3000)):  # longer than the host needs for a step
        gpus.slow_down(device, kernel_us)
    wait_until(lambda: len(run.steps) > MEASURED_STEPS, 240, "steps")
    shown = duet(gpus, project, "./monitor_training.sh", f"--run={run.run.path}", "--json")
    looked = duet(gpus, project, "./duet", "inspect", run.run.path, "--json")
    run.process.terminate()
    assert run.wait() == 75
    fast, slow = (rank["compute_ms_median"] for rank in json.loads(shown)["ranks"])
    assert slow > 3 * fast > 0, (fast, slow)
    alerts = {(alert["code"], alert["rank"]) for alert in json.loads(shown)["alerts"]}
    assert ("alert.slow_rank", 1) in alerts and ("alert.slow_rank", 0) not in alerts
    (speed,) = [c for c in json.loads(looked)["checks"] if c["name"] == "speed"]
    assert (speed["status"], speed["ranks"]) == (WARN, [1])


def test_a_task_that_moves_tensors_itself(train: Train, tmp_path: Path) -> None:
    (tmp_path / "partly.py").write_text(TASK)
    flags = {"data": None, "sample_tokens": None, "tiny": False, "num_workers": 0}
    own = {"device_batch_size": 4, "num_iterations": 3, "report": False, "tensorboard": False}
    run = train(task=tmp_path / "partly.py", eval_every=0, **flags | own).ok()
    assert run.summary["steps"] == 3


@pytest.mark.timeout(900)  # compiled for training, evaluation and sample, before and after
@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"compile": 1, "sample_tokens": 4}, marks=pytest.mark.soak)],
    ids=["eager", "compiled"],
)
def test_gpus_without_bf16_train_in_fp16(train: Train, flags: dict[str, object]) -> None:
    turing = {
        **{"NULL_GPU_NAME": "Tesla T4", "FAKE_NVML_NAME": "Tesla T4", "NULL_GPU_GIB": "16"},
        **{"NULL_GPU_CAPABILITY": "7.5", "FAKE_NVML_CAPABILITY": "7.5"},
    }
    often = {"eval_every": 4, "save_every": 4}
    run = train(name="turing", num_iterations=8, env=turing, **often, **flags)
    assert run.wait(400) == 0, run.output[-3000:]
    plan = read_json(run.run.plan) or {}
    assert plan["compile"]["value"] is ("compile" in flags)
    assert plan["precision"]["value"] == "fp16" and "Tesla T4" in plan["precision"]["reason"]
    assert plan["tf32"]["value"] is False
    assert sorted(run.steps) == list(range(1, 9))
    step = run.steps[8]
    assert (step["loss_scale"], step["skipped_steps"]) == (65536.0, 0)
    assert run.summary["skipped_steps"] == 0
    resumed = train(resume="turing", num_iterations=12, env=turing, **flags)
    assert resumed.wait(400) == 0, resumed.output[-3000:]
    assert resumed.summary["steps"] == 12 and resumed.summary["begun_at"] == 8
    assert resumed.steps[12]["loss_scale"] == 65536.0


def test_all_ranks_stop_after_the_same_step(train: Train) -> None:
    run = train(num_iterations=100_000, log_every=100)
    run.wait_for("Iter: 1,")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    step = run.summary["steps"]
    assert step > 1 and max(run.steps) == step, "the steps in flight are recorded and saved"
    assert (run.run.checkpoints / f"step_{step:08d}").is_dir()


def test_out_of_memory_takes_a_smaller_batch(train: Train) -> None:
    run = train(num_iterations=12, retries=2, inject="oom@rank=1,step=3").ok()
    assert run.summary["steps"] == 12
    (restart,) = [e for e in read_records(run.run.events) if e["event"] == "restart"]
    assert restart["changes"] == {"device_batch_size": [4, 2]}
    assert run.run.memory_snapshot(1).exists(), "also after the restart"


def test_memory_that_another_program_takes_does_not_change_the_batch(
    train: Train, gpus: NullGpus
) -> None:
    run = train(num_iterations=12, retries=2)
    wait_until(lambda: gpus.state.exists() and run.pids, 60, "the ranks")
    for device in (0, 1):
        gpus.occupy(device, 22.825)  # all but 3 MiB, after the plan
    run.wait_for("CUDA out of memory")
    failure = read_json(run.run.failure) or {}
    assert [p["pid"] for p in failure["occupied"]["processes"]] == [os.getpid()]
    for device in (0, 1):
        gpus.occupy(device, 0)
    run.ok()
    assert run.summary["steps"] == 12
    (restart,) = [e for e in read_records(run.run.events) if e["event"] == "restart"]
    assert restart["changes"] == {}


def test_the_memory_of_an_exhausted_gpu_is_kept(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=100_000, log_every=100, retries=0, inject="oom@rank=1,step=3")
    assert run.wait() == 4
    assert (run.failure["cause"], run.failure["rank"]) == ("gpu_oom", 1)
    memory = run.failure["memory"]
    assert memory["file"] == str(run.run.memory_snapshot(1))
    assert memory["file"] in run.output, "the card names it"
    assert memory["reserved_bytes"] >= memory["allocated_bytes"] > 20 << 30
    assert 0 < memory["requested_bytes"] <= 20 << 20, "a segment for the last, small piece"
    assert memory["largest"][0] == {"bytes": 1 << 34, "count": 1}
    snapshot = pickle.loads(run.run.memory_snapshot(1).read_bytes())
    assert sum(s["total_size"] for s in snapshot["segments"]) == memory["reserved_bytes"]


def test_a_lost_gpu_is_named(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=100_000, log_every=100, retries=0)
    run.wait_for("Iter: 1,")
    gpus.break_down(1, 999)
    assert run.wait() == 4
    assert (run.failure["cause"], run.failure["rank"]) == ("gpu_hardware", 1)
    assert run.failure["lost_ranks"] == [1]
    # the driver counts it, but it does not answer
    others = msg("host.gpus.on_machine", gpus=plural(1, "GPU"))
    assert msg("host.gpus.silent", selected=others, gpus=1, kernel="") in run.failure["summary"]


@pytest.mark.parametrize(
    ("ranks", "odd"),
    # Two ranks have no majority, so none is the odd one.
    [(2, None), pytest.param(3, 1, marks=pytest.mark.soak)],
)
def test_different_collectives_are_named(train: Train, ranks: int, odd: int | None) -> None:
    flags = {"num_iterations": 100_000, "log_every": 100, "total_batch_size": 128 * ranks}
    faulty = {"hang_timeout": 10, "retries": 0, "inject": "desync@rank=1,step=5"}
    run = train(ranks=ranks, **flags, **faulty)
    assert run.wait(240) == 5, run.output[-3000:]
    assert (run.failure["kind"], run.failure["rank"]) == ("desync", odd)


@pytest.mark.timeout(900)  # compiled three times: for training, evaluation and the restart
def test_a_compiled_run_recovers(train: Train) -> None:
    flags = {"eval_every": 3, "save_every": 2, "retries": 1, "inject": "kill@step=5"}
    run = train(compile=1, depth=5, num_iterations=6, **flags)
    assert run.wait(840) == 0, run.output[-3000:]
    assert run.summary["steps"] == 6
    events = read_records(run.run.events)
    assert [e["event"] for e in events if e["event"] == "restart"] == ["restart"]
    plan = read_json(run.run.plan) or {}
    assert plan["compile"]["value"] is True
    # A small batch and a fast exchange: one graph of four blocks, one of the last.
    assert plan["blocks_per_graph"]["value"] == 4


def test_a_gpu_that_never_finishes_is_a_hang(train: Train, gpus: NullGpus) -> None:
    run = train(num_iterations=100_000, log_every=100, hang_timeout=10, retries=0)
    run.wait_for("Iter: 1,")
    gpus.stall(1)
    assert run.wait() == 5
    assert (run.failure["cause"], run.failure["rank"]) == ("hang", 1)


def test_a_profile_without_the_gpu_s_activity_is_a_warning(train: Train) -> None:
    run = train(num_iterations=16, profile=2).ok()
    assert run.summary["steps"] == 16
    for rank in (0, 1):
        digest = read_json(run.run.profile_digest(rank)) or {}
        assert (digest["timeline"], digest["first_step"], digest["last_step"]) == ("host", 11, 12)
    warnings = [e for e in read_records(run.run.events) if e["event"] == "warning"]
    assert [e["code"] for e in warnings] == ["warning.profile"] * 2


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
