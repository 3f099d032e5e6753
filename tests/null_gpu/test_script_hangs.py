"""Scripts of the user that hang on GPUs: who waits for a GPU is known by the device that a process has
open, a thread that spins, and the collectives of torch's flight recorder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launched, Launcher
from tests.null_gpu.conftest import NullGpus
from training.core.messages import msg
from training.core.rundir import read_records

pytestmark = pytest.mark.timeout(1800)
Start = Callable[..., Launched]
LIMIT_S = 600.0  # several imports of the CUDA build take minutes on busy cores
HANG_S = 6  # --hang_timeout


@pytest.fixture
def gpus(gpus: NullGpus) -> NullGpus:
    """They look like GPUs from outside their processes, too."""
    if "NULL_GPU_ROOT" not in gpus.environ:
        pytest.skip("no device files: this system allows no user namespaces (unshare --user)")
    gpus.environ["NULL_GPU_SPINS"] = "1"
    return gpus


SCRIPT = """
import datetime, os, sys, time, torch, torch.distributed as dist
fault, number = sys.argv[1], 0
limit = datetime.timedelta(seconds=20 if fault == "computes" else 600)
dist.init_process_group("nccl", timeout=limit)
rank = dist.get_rank()
torch.cuda.set_device(rank)
values = torch.ones(1000, device="cuda")
while True:
    if rank == 1 and number == 5 and fault == "sleeps":
        time.sleep(600)
    while number == 5 and fault in ("waits", "computes") and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    if fault == "computes":
        values.mul_(1)
        torch.cuda.current_stream().synchronize()
    if rank == 1 and number == 5 and fault == "differs":
        dist.broadcast(values, src=0)
    else:
        dist.all_reduce(values)
    torch.cuda.synchronize() if fault == "differs" else values[0].item()
    print(f"step {number} loss 1.0", flush=True)
    number += 1
"""


def place(folder: Path, text: str) -> str:
    return f"{folder / 'script.py'}:{SCRIPT[: SCRIPT.index(text)].count(chr(10)) + 1}"


def verdict(run: Launched) -> dict[str, Any]:
    assert run.wait(LIMIT_S) == 5, run.output[-3000:]
    (found,) = verdicts(run)
    return found


def verdicts(run: Launched) -> list[dict[str, Any]]:
    return [event for event in read_records(run.run.events) if event["event"] == "verdict"]


def test_different_collectives_are_named(start_script: Start) -> None:
    found = verdict(start_script(SCRIPT, "differs", hang_timeout=HANG_S))
    assert (found["kind"], found["rank"]) == ("desync", None), found
    assert "rank 0: all_reduce of float [1000]" in found["text"]
    assert "rank 1: broadcast of float [1000]" in found["text"]


def test_a_rank_that_comes_to_no_collective_is_named(start_script: Start, tmp_path: Path) -> None:
    its_sleep_is_named(start_script(SCRIPT, "sleeps", hang_timeout=HANG_S), tmp_path)


def test_a_rank_of_another_launcher_is_named(
    gpus: NullGpus, project: Path, tmp_path: Path, token: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    folders = (f"--out_dir={tmp_path / 'experiments'}", f"--log_dir={tmp_path / 'logs'}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    run = Launcher(project, tmp_path, token)(
        *("./duet", "watch", "--run_name=run", f"--hang_timeout={HANG_S}", "--report=false"),
        *(*folders, "--", *torchrun, "--local-addr=127.0.0.1", "--nproc-per-node=2"),
        *(str(tmp_path / "script.py"), "sleeps"),
        name="run", bare=True, env=gpus.environ,
    )  # fmt: skip
    its_sleep_is_named(run, tmp_path)


def its_sleep_is_named(run: Launched, folder: Path) -> None:
    found = verdict(run)
    assert (found["kind"], found["rank"]) == ("hang", 1), found
    assert found["where"] == place(folder, "time.sleep")
    waits = f"waits in {msg('watchdog.gpu')} at {place(folder, 'torch.cuda.synchronize')} "
    assert list(found["waiting"]) == ["0"] and found["waiting"]["0"].startswith(waits), found


def test_a_gpu_that_does_not_reach_the_collective_is_named(
    start_script: Start, gpus: NullGpus, tmp_path: Path
) -> None:
    stalled = tmp_path / "stalled"  # between two steps, so that it is not reached for certain
    run = start_script(SCRIPT, "waits", str(stalled), hang_timeout=HANG_S)
    run.wait_for("step 4 ", LIMIT_S)
    gpus.stall(1)
    stalled.touch()
    found = verdict(run)
    assert (found["kind"], found["rank"]) == ("hang", 1), found
    assert "its GPU" in found["text"], found


def test_a_gpu_that_computes_for_longer_than_torchs_timeout_is_named(
    start_script: Start, gpus: NullGpus, tmp_path: Path
) -> None:
    """None of its collectives is pending: it may compute, so that only the timeout ends the run."""
    slow = tmp_path / "slow"
    run = start_script(SCRIPT, "computes", str(slow), hang_timeout=HANG_S)
    run.wait_for("step 4 ", LIMIT_S)
    gpus.slow_down(1, kernel_us=600_000_000)
    slow.touch()
    assert run.wait(LIMIT_S) == 4, run.output[-3000:]
    failure = run.failure
    assert (failure["cause"], failure["rank"]) == ("collective_timeout", 1), failure
    assert failure["where"] == place(tmp_path, "torch.cuda.current_stream"), failure


# Without output, each rank waits in the same places for much longer than the limit.
HEALTHY = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
values = torch.ones(1000, device="cuda")
for number in range(5):
    dist.all_reduce(values)
    print(f"step {number} loss 1.0", flush=True)
for _ in range(40):  # one collective after another
    values.mul_(1)
    dist.all_reduce(values)
    values[0].item()
for _ in range(60):  # then one behind much work
    values.mul_(1)
dist.all_reduce(values)
values[0].item()
print("done", flush=True)
dist.destroy_process_group()
"""


def test_gpus_that_compute_are_waited_for(start_script: Start, gpus: NullGpus) -> None:
    for device in (0, 1):
        gpus.slow_down(device, kernel_us=500_000)
    run = start_script(HEALTHY, hang_timeout=HANG_S, communication_test=0)
    assert run.wait(LIMIT_S) == 0, run.output[-3000:]
    assert "done" in run.output and not verdicts(run)
