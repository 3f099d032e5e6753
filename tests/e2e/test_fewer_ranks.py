"""A run with --min_ranks continues after the loss of a GPU: the same samples, fewer ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launched
from training.core.rundir import read_json, read_records

Launch = Callable[..., Launched]
# Muon would amplify the last bits, which differ for another order of sums.
FLAGS = {
    "total_batch_size": 1536,
    "device_batch_size": 4,
    "save_every": 5,
    "precision": "fp32",
    "optimizer": "adamw",
    "num_iterations": 30,
    "sample_tokens": 0,
}
CONFIG = "configs/dual_gpu/quickstart.py"


def start(launch: Launch, ranks: int, **flags: object) -> Launched:
    return launch("./launch_train.sh", str(ranks), CONFIG, **(FLAGS | flags))


def events(run: Launched, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_records(run.run.events) if r["event"] == kind]


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        pytest.param(3, 1, marks=pytest.mark.slow),
        *(
            soak(ranks, lost)
            for ranks in (2, 3, 4)
            for lost in range(ranks)
            if (ranks, lost) != (3, 1)
        ),
    ],
)
def test_every_single_loss(launch: Launch, once: Launch, ranks: int, lost: int) -> None:
    whole = start(once, ranks)
    run = start(launch, ranks, min_ranks=1, inject=f"ecc@rank={lost},step=13").ok()
    same, other = whole.losses, run.losses
    assert other[:10] == same[:10], "bit for bit with as many ranks"
    assert other == pytest.approx(same, rel=1e-5), "the same samples, summed in another order"
    (restart,), (recovered,), (pace,) = (
        events(run, kind) for kind in ("restart", "recovered", "pace")
    )
    assert restart["ranks"] == pace["ranks"] == [ranks, ranks - 1]
    assert (restart["cause"], restart["resumes_at"]) == ("gpu_hardware", 10)
    assert [one["seat"] for one in restart["lost"]] == [lost]
    assert restart["expected_slowdown"] == pytest.approx(ranks / (ranks - 1))
    assert recovered["step"] == 11 and pace["slowdown"] > 0
    plan = read_json(run.run.plan) or {}
    assert plan["ranks"] == ranks - 1 and plan["elastic"]["ranks"] == ranks
    assert [one["seat"] for one in run.summary["lost"]] == [lost]
    assert not run.run.failure.exists()


@pytest.mark.soak
def test_a_rank_that_fails_twice_is_left_out(launch: Launch) -> None:
    faults = "kill@rank=2,step=7;kill@rank=2,step=13,attempt=2"
    run = start(launch, 3, min_ranks=2, inject=faults).ok()
    first, second = events(run, "restart")
    assert "ranks" not in first and second["ranks"] == [3, 2]
    assert [one["seat"] for one in second["lost"]] == [2]


SCRIPT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("ranks", dist.get_world_size(), "restarts", restarts, flush=True)
dist.barrier()
if restarts == 0 and dist.get_rank() == 1:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
dist.barrier()
dist.destroy_process_group()
"""


FAILING = """
import os, signal, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("ranks", dist.get_world_size(), "restarts", restarts, flush=True)
if dist.get_rank() == 0:
    torch.save({"EPOCHS_RUN": restarts}, sys.argv[1])
dist.barrier()
if dist.get_world_size() == 3 and dist.get_rank() == 1:
    if restarts == 0:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def of_script(launch: Launch, folder: Path, code: str) -> Launched:
    (folder / "loop.py").write_text(code)
    words = ["--min_ranks=2", f"--out_dir={folder / 'experiments'}", f"--log_dir={folder}"]
    words += ["--run_name=script", "--device=cpu", "--report=false", str(folder / "loop.py")]
    words += [str(folder / "snapshot.pt")]
    return launch("./duet", "run", "-n", "3", *words, bare=True, name="script")


@pytest.mark.slow
def test_a_script_s_rank_that_fails_again_after_progress_is_left_out(
    launch: Launch, tmp_path: Path
) -> None:
    run = of_script(launch, tmp_path, FAILING).ok()
    assert "ranks 3 restarts 1" in run.output and "ranks 2 restarts 2" in run.output
    first, second = events(run, "restart")
    assert "ranks" not in first and second["ranks"] == [3, 2]
    assert [one["seat"] for one in second["lost"]] == [1]


@pytest.mark.soak
def test_a_script_starts_again_with_fewer_ranks(launch: Launch, tmp_path: Path) -> None:
    run = of_script(launch, tmp_path, SCRIPT).ok()
    assert "ranks 3 restarts 0" in run.output and "ranks 2 restarts 1" in run.output
    (restart,) = events(run, "restart")
    assert restart["ranks"] == [3, 2] and [one["seat"] for one in restart["lost"]] == [1]
    assert "expected_slowdown" not in restart


@pytest.mark.soak
def test_below_the_minimum_the_run_ends_and_a_resume_has_all_ranks(
    launch: Launch, once: Launch
) -> None:
    whole = start(once, 3)
    faults = "ecc@rank=0,step=13;ecc@rank=0,step=17,attempt=2"
    run = start(launch, 3, name="ended", min_ranks=2, inject=faults)
    assert run.wait() == 4
    assert run.failure["cause"] == "gpu_hardware"
    assert len(events(run, "restart")) == len(events(run, "given_up")) == 1
    resumed = launch("./launch_train.sh", "3", tiny=False, resume="ended").ok()
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    plan = read_json(resumed.run.plan) or {}
    assert plan["ranks"] == 3 and plan["elastic"]["lost"] == []
