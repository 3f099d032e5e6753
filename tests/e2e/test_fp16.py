"""fp16 with real ranks. A CPU computes it, although too slowly for anything but a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank

Launch = Callable[..., Launched]
RUN = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")
IN_FP16 = """
from training.trainer import loss_scale, train_state
begin = train_state.begin
def planned(plan, *rest):
    plan["precision"] = {"value": "fp16", "reason": "a test"}
    return begin(plan, *rest)
train_state.begin = planned
"""
# A gradient of this rank alone, which DDP has not seen.
AT_STEP_3 = """
unscale, calls = loss_scale.LossScale.unscale, [0]
def local(self, weights):
    calls[0] += 1
    return unscale(self, weights) + (calls[0] == 3)
loss_scale.LossScale.unscale = local
"""
AT_STEP_5 = """
scaled, calls = loss_scale.LossScale.scaled, [0]
def infinite(self, loss):
    calls[0] += 1
    return scaled(self, loss) * (float("inf") if calls[0] == 10 else 1)  # of two micro-batches
loss_scale.LossScale.scaled = infinite
"""
SMALL = """
loss_scale.INITIAL = 2.0
"""
ALWAYS = """
loss_scale.LossScale.scaled = lambda self, loss: loss * float("nan")
"""


def both(rank_0: str, rank_1: str) -> str:
    return at_rank(0, IN_FP16 + rank_0) + at_rank(1, IN_FP16 + rank_1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "license.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes()[:9000])
    return path


@pytest.mark.slow
def test_ranks_skip_the_same_steps_and_resume_with_the_scale(launch: Launch, text: Path) -> None:
    flags = {"data": text, "inspect_every": 1, "device_batch_size": 2, "ema": 0.9}
    hook = both(AT_STEP_5, AT_STEP_3)
    run = launch(*RUN, name="half", num_iterations=8, hook=hook, **flags).ok()
    figures = [(r["loss_scale"], r["skipped_steps"], r["grad_norm"]) for r in run.steps.values()]
    assert [f[:2] for f in figures] == [
        *[(65536.0, 0)] * 2,
        *[(65536.0, 1), (32768.0, 1), (32768.0, 2)],
        *[(16384.0, 2)] * 3,
    ]
    assert [n for n, f in enumerate(figures, 1) if f[2] is None] == [3, 5]
    assert run.losses[-1] < run.losses[0] and run.summary["skipped_steps"] == 2
    resumed = launch(
        *("./launch_train.sh", "2"), tiny=False, resume="half", num_iterations=10, hook=both("", "")
    ).ok()
    last = resumed.steps[10]
    assert (last["loss_scale"], last["skipped_steps"]) == (16384.0, 2)


@pytest.mark.slow
def test_a_run_that_skips_every_step_fails(launch: Launch, text: Path) -> None:
    hook = both(SMALL, SMALL + ALWAYS)
    run = launch(*RUN, num_iterations=40, device_batch_size=2, data=text, hook=hook)
    assert run.wait() == 4
    assert (run.failure["cause"], run.failure["rank"]) == ("nan_loss", None)
    assert "smallest fp16 loss scale" in run.failure["summary"]
    assert len(run.steps) == 10
