"""Code that only GPUs execute and that no other test of this folder runs: choice of the GPUs, settings
that save memory, samples, Ctrl-C, copies of a checkpoint, an aborted collective, a user's script."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, TOKEN, wait_until
from tests.e2e.conftest import Launched
from tests.null_gpu import programs
from tests.null_gpu.conftest import CONTEXT, GIB, NullGpus, duet
from training.core import manifest
from training.core.course import SPEED_STEPS
from training.core.rundir import read_json, read_records
from training.monitor.report import run as report_run
from training.tasks import trained

pytestmark = pytest.mark.timeout(1800)
Train = Callable[..., Launched]
LIMIT_S = 600.0  # several imports of the CUDA build take minutes on busy cores
UUID = "GPU-{:08x}-0000-4000-8000-000000000000"


def plan(run: Launched) -> dict[str, Any]:
    return read_json(run.run.plan) or {}


def ranks_on(run: Launched, gpus: NullGpus, order: tuple[int, ...]) -> None:
    """Rank r has a context on the r-th of these GPUs and on no other one."""
    for rank, device in enumerate(order):
        own = {other for other, pid in run.pids.items() if pid in gpus.processes(device)}
        assert own == {rank}, f"ranks on GPU {device}"


def test_the_emptiest_gpus_are_used_shown_and_left_by_ctrl_c(
    train: Train, gpus: NullGpus, project: Path
) -> None:
    gpus.occupy(0, 4)  # by another program
    three = {"NULL_GPU_COUNT": "3", "FAKE_NVML_COUNT": "3"}
    watts = {"FAKE_NVML_ENERGY": "9,431,70", "FAKE_NVML_POWER": "9,430,71"}
    gpus.environ |= three | watts  # of the monitor, too
    run = train(num_iterations=100_000, log_every=100, env=three)
    run.wait_for("Iter: 1,", LIMIT_S)
    assert [gpu["index"] for gpu in plan(run)["gpus"]] == [1, 2]
    ranks_on(run, gpus, (1, 2))
    assert set(run.pids.values()).isdisjoint(gpus.processes(0))
    wait_until(
        lambda: sum("power_w" in s for s in run.steps.values()) > SPEED_STEPS,
        LIMIT_S,
        "the power of the GPUs",
    )
    shown = json.loads(
        duet(gpus, project, "./monitor_training.sh", f"--run={run.run.path}", "--json")
    )
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    step = run.summary["steps"]
    assert max(run.steps) == step and (run.run.checkpoints / f"step_{step:08d}").is_dir()
    assert {gpu["name"] for gpu in shown["gpus"]} == {programs.GPU}
    used = [step for step in run.steps.values() if "power_w" in step]
    for one in used:  # the mean power by the counters of energy
        assert one["power_w"] == pytest.approx(431 + 70, rel=0.02)
        assert one["joules_per_unit"] == pytest.approx(one["power_w"] / one["tokens_per_s"])
    there = {gpu["index"]: gpu for gpu in shown["gpus"]}
    assert {index: gpu["power_w"] for index, gpu in there.items()} == {0: 9, 1: 430, 2: 71}
    assert {index for index, gpu in there.items() if gpu["in_plan"]} == {1, 2}
    assert {gpu["memory_total_bytes"] for gpu in there.values()} == {24 * GIB}
    assert there[0]["memory_used_bytes"] == 4 * GIB + CONTEXT
    assert all(CONTEXT < there[index]["memory_used_bytes"] < GIB for index in (1, 2))
    figures, ranks = shown["training"], [rank["memory_bytes"] for rank in shown["ranks"]]
    assert len(ranks) == 2 and figures["memory_bytes"] == max(ranks) and min(ranks) > 0
    usual = statistics.median(one["joules_per_unit"] for one in used if one["step"] > 1)
    assert figures["joules_per_unit"] == pytest.approx(usual, rel=0.3), "of the last steps"
    page = report_run.read_run(run.run)
    assert page.metrics.median("joules_per_unit") == pytest.approx(usual)
    power = [value for _, value in page.metrics.curves["power_w"].means]
    assert power == pytest.approx([431 + 70] * len(power), rel=0.02)
    assert page.metrics.peak("memory_bytes") == max(
        max(one["memory_bytes"]) for one in run.steps.values()
    )


def test_a_run_with_another_allocator_of_torch(train: Train) -> None:
    """It has no snapshot of its blocks, and no history."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    run = train(ranks=1, num_iterations=2, debug=1, env=env)
    assert run.wait(LIMIT_S) == 0, run.output[-3000:]
    assert sorted(run.steps) == [1, 2]


def test_the_gpus_of_the_user_in_his_order(train: Train, gpus: NullGpus) -> None:
    chosen = ",".join(UUID.format(0xA0 + device) for device in (1, 0))
    run = train(num_iterations=100_000, log_every=100, env={"CUDA_VISIBLE_DEVICES": chosen})
    run.wait_for("Iter: 1,", LIMIT_S)
    assert [gpu["index"] for gpu in plan(run)["gpus"]] == [1, 0]
    ranks_on(run, gpus, (1, 0))
    run.process.terminate()
    assert run.wait() == 75


@pytest.mark.parametrize(
    ("precision", "saving"),
    [
        ("fp32", {"activation_checkpointing": 1, "loss_chunks": 2}),
        ("bf16", {"activation_checkpointing": "selective", "loss_chunks": 2}),
        pytest.param(
            "bf16",
            {"activation_checkpointing": "selective", "loss_chunks": 2, "compile": 1, "depth": 2},
            marks=pytest.mark.soak,  # compiles
        ),
    ],
    ids=["full", "selective", "compiled"],
)
def test_settings_that_save_memory_and_commands_on_the_result(
    train: Train, gpus: NullGpus, project: Path, precision: str, saving: dict[str, object]
) -> None:
    often = {"eval_every": 4, "save_every": 4, "sample_tokens": 4}
    own = {"ema": 0.9, "keep_best": True, "max_time": "1h", "deterministic": True, "report": True}
    run = train(precision=precision, num_iterations=8, **often, **own, **saving)
    assert run.wait(900) == 0, run.output[-3000:]
    decided = plan(run)
    assert decided["compile"]["value"] is ("compile" in saving)
    assert decided["precision"]["value"] == precision
    assert decided["tf32"]["value"] is (precision == "bf16")
    load = decided["memory"]["load"]
    blocks = (load["blocks"], load["selective"])
    depth = saving.get("depth", 1)
    assert blocks == ((1, 0) if precision == "fp32" else (0, depth)) and load["chunks"] == 2
    assert sorted(run.steps) == list(range(1, 9)) and isinstance(run.summary["sample"], str)
    assert [r["step"] for r in read_records(run.run.metrics) if "eval_ms" in r] == [4, 8]
    for record in read_records(run.run.metrics):
        assert "eval_ms" not in record or record["weights"] == "ema"
    state = torch.load(run.run.checkpoints / "step_00000008" / manifest.STATE, weights_only=True)
    average = state[trained.AVERAGE]
    assert average and average.keys() <= state["model"].keys(), average.keys()
    report = run.run.report.read_text()
    assert programs.GPU in report
    if precision == "bf16":  # each command imports torch
        return
    sampled = duet(gpus, project, "./duet", "sample", run.run.path, "--max_tokens=4", "--json")
    assert json.loads(sampled)["device"].startswith("cuda"), sampled
    text = f"--data={run.run.path.parent.parent / 'text.txt'}"
    measured = duet(gpus, project, "./duet", "evaluate", run.run.path, text, "--json")
    (evaluated,) = json.loads(measured)["evaluations"]
    assert evaluated["tokens"] > 0


def test_the_weights_are_compared_in_each_step(train: Train) -> None:
    # Of one rank: what kernels of null GPUs write differs between ranks.
    run = train(ranks=1, num_iterations=3, inspect_every=1)
    assert run.wait(LIMIT_S) == 0 and run.summary["steps"] == 3


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training.inspector import DDPInspector, distributed
world = distributed.setup()
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(world.device), device_ids=[world.device.index])
data = TensorDataset(torch.zeros(400, 8))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inspector = DDPInspector(model, loader, every=0)
for step in range(40):
    for (batch,) in loader:
        loss = model(batch.to(world.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inspector.step(loss, batch)
        break
print(f"rank {world.rank} on {world.device}: done", flush=True)
distributed.cleanup()
"""


# As in PyTorch's DDP tutorial: the current GPU of every rank stays the first one.
TUTORIAL = """
import os
from types import SimpleNamespace
dist.init_process_group("nccl")
world = SimpleNamespace(rank=dist.get_rank(), device=torch.device("cuda", dist.get_rank()))
seen, record = set(), torch.cuda.Event.record
def noted(event, stream=None):
    seen.add((stream or torch.cuda.current_stream()).device)
    return record(event, stream)
torch.cuda.Event.record = noted
"""


@pytest.mark.parametrize(
    ("setup", "end"),
    [
        ("world = distributed.setup()", ""),
        (TUTORIAL, "assert torch.cuda.current_device() == 0 and seen == {world.device}, seen"),
    ],
)
def test_a_script_of_the_user(start_script: Callable[..., Launched], setup: str, end: str) -> None:
    text = SCRIPT.replace("world = distributed.setup()", setup).replace(
        "distributed.cleanup()", end
    )
    run = start_script(text)
    assert run.wait(LIMIT_S) == 0, run.output[-3000:]
    for rank in (0, 1):
        text = (run.run.ranks / f"rank{rank}.log").read_text()
        assert f"rank {rank} on cuda:{rank}: done" in text
    warned = [e for e in read_records(run.run.events) if e["event"] == "warning"]
    assert not warned, warned


# What the step has queued is part of the checkpoint, what follows is not.
COPIED = """
import sys, time, torch
from pathlib import Path
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.checkpoint import TrainProgress
folder = Path(sys.argv[1])
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
facts = {"shape": {}, "optimizer": "", "world_size": 1, "data": {}, "tokenizer": None}
weights, large = torch.zeros(4, device=device), torch.empty(1 << 20, device=device)
sparse = torch.eye(2).to_sparse().to(device)
numbers = [torch.full((4,), float(n)).pin_memory() for n in range(4)]
saver = AsyncCheckpointer(folder / "saved", 5, lambda step, path: None, lambda code, text: print(text))
(folder / "saved").mkdir()
with saver:
    for step in (1, 2):
        (folder / f"stall{step}").touch()
        while not (folder / f"stalled{step}").exists():
            time.sleep(0.01)
        weights.copy_(numbers[step], non_blocking=True)
        (folder / f"saving{step}").touch()
        saver.save(TrainProgress(step, 0, 8), {"model": {"w": weights, "s": sparse, "large": large}, "optimizer": []}, facts, required=False)
        weights.copy_(numbers[3], non_blocking=True)
"""


@pytest.mark.parametrize("pinned_mib", [16, 1], ids=["pinned", "not pinned"])
def test_a_checkpoint_has_what_was_queued_before_it(
    pinned_mib: int, gpus: NullGpus, tmp_path: Path, token: str
) -> None:
    gpus.environ["NULL_GPU_PINNED_MIB"] = str(pinned_mib)
    with started(gpus, token, tmp_path, COPIED, 1, tmp_path) as (program,):
        for step in (1, 2):
            reached(program, tmp_path, f"stall{step}")
            gpus.stall(1)
            (tmp_path / f"stalled{step}").touch()
            reached(program, tmp_path, f"saving{step}")
            end = time.monotonic() + 0.5
            while time.monotonic() < end:  # its copies wait for the GPU
                assert not list((tmp_path / "saved").glob(f"step_{step:08d}"))
                time.sleep(0.05)
            gpus.go_on(1)
        assert program.wait(LIMIT_S) == 0, (tmp_path / "0.txt").read_text()
        assert not gpus.processes(0), "nothing is on the first GPU"
    without = (tmp_path / "0.txt").read_text().count("no pinned host memory")
    assert without == (pinned_mib < 4)  # once for both
    for step in (1, 2):
        state = torch.load(tmp_path / f"saved/step_{step:08d}" / manifest.STATE, weights_only=True)
        assert state["model"]["w"].tolist() == [step] * 4


MOVED = """
import torch
from training.tasks.base import moved
batch = {"small": torch.ones(1 << 10), "large": torch.full((1 << 20,), 2.0)}
for _ in range(2):
    found = moved(batch, torch.device("cuda", 1))
    torch.cuda.synchronize(1)
    assert all(value.device.index == 1 for value in found.values())
    assert all(torch.equal(found[name].cpu(), batch[name]) for name in batch)
"""


def test_a_batch_arrives_where_little_memory_can_be_pinned(
    gpus: NullGpus, tmp_path: Path, token: str
) -> None:
    gpus.environ["NULL_GPU_PINNED_MIB"] = "1"
    with started(gpus, token, tmp_path, MOVED, 1) as (program,):
        assert program.wait(LIMIT_S) == 0, (tmp_path / "0.txt").read_text()


def reached(program: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    wait_until(lambda: (folder / name).exists() or program.poll() is not None, LIMIT_S, name)
    assert program.poll() is None, (folder / "0.txt").read_text()


# rank 1 leaves out a collective
ABORTED = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("nccl", timeout=timedelta(seconds=5))
torch.cuda.set_device(dist.get_rank())
one = torch.ones(1, device="cuda")
dist.all_reduce(one)
if dist.get_rank() == 0:
    dist.all_reduce(one)
    torch.cuda.synchronize()
time.sleep(600)  # rank 1
"""


def test_a_rank_that_leaves_out_a_collective_is_named_when_nccl_aborts(
    start_script: Callable[..., Launched], tmp_path: Path
) -> None:
    """Before Duet's own limit."""
    # Without the stacks of all threads, for which torch needs minutes on busy cores.
    run = start_script(ABORTED, env={"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, hang_timeout=600)
    assert run.wait(LIMIT_S) == 4, run.output[-3000:]
    failure, line = run.failure, ABORTED[: ABORTED.index("time.sleep")].count("\n") + 1
    assert (failure["cause"], failure["rank"]) == ("collective_timeout", 1)
    assert failure["where"] == f"{tmp_path / 'script.py'}:{line}"
    assert failure["victim"] and set(failure["waiting"]) == {"0"}
    assert (Path(failure["stacks"]) / "rank1.txt").exists()
    verdicts = [e for e in read_records(run.run.events) if e["event"] == "verdict"]
    assert [verdict["rank"] for verdict in verdicts] == [1]


@contextlib.contextmanager
def started(
    gpus: NullGpus, token: str, folder: Path, text: str, ranks: int, *args: object
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks that run this program; killed at the end. Their output is in RANK.txt."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | gpus.environ
    own |= {"PYTHONPATH": f"{programs.CUDA_TORCH}:{ROOT}", "WORLD_SIZE": str(ranks), TOKEN: token}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as files:
        found = [
            subprocess.Popen(
                [sys.executable, "-c", text, *map(str, args)],
                env=own | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context((folder / f"{rank}.txt").open("wb")),
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            yield found
        finally:
            for program in found:
                program.kill()
                program.wait()
