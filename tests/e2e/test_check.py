"""`--check` with every way to start: both figures and a verdict, the right exit code, nothing launched, nothing written."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Launched

QUICKSTART = "configs/dual_gpu/quickstart.py"
WAYS = {
    "simple": ["./train_dual_gpu.sh", QUICKSTART],
    "enhanced": ["./train_dual_gpu_enhanced.sh"],
    "launch_train": ["./launch_train.sh", "--check", "1", QUICKSTART],
    "train.py": [sys.executable, "train.py", QUICKSTART],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_check_measures_and_leaves_nothing(way: str, launch: Callable[..., Launched]) -> None:
    command = [*WAYS[way], *([] if "--check" in WAYS[way] else ["--check"])]
    run = launch(*command)
    run.ok()
    for part in ("Plan (", "Resources", "formula (eager, ", "fake tensors (the same step)", "verdict: fits, "):
        assert part in run.output
    assert not run.run.path.exists() and not run.logs.exists()


def test_a_step_that_does_not_fit_is_exit_3(launch: Callable[..., Launched]) -> None:
    flags = {
        "device_batch_size": 4096,
        "max_seq_len": 1024,
        "total_batch_size": 2 * 4096 * 1024,
        "depth": 4,
        "activation_checkpointing": "none",
    }
    run = launch("./train_dual_gpu.sh", QUICKSTART, "--check", **flags)
    assert run.wait() == 3
    assert "verdict: does not fit, " in run.output
    assert "--device_batch_size=" in run.output
    assert "Traceback" not in run.output
    assert not run.run.path.exists()
