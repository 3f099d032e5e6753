"""`--check` with every way to start: all checks, both memory values and a verdict, the exit code;
nothing is launched or written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TOKEN
from tests.e2e.conftest import Launched

QUICKSTART = "configs/dual_gpu/quickstart.py"
WAYS = {
    "simple": ["./train_dual_gpu.sh", QUICKSTART],
    "enhanced": ["./train_dual_gpu_enhanced.sh"],
    "launch_train": ["./launch_train.sh", "--check", "1", QUICKSTART],
    "train.py": [sys.executable, "train.py", QUICKSTART],
}


@pytest.mark.slow
# One way to start per test for every change; all of them in `make soak`.
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way == "launch_train" else pytest.mark.soak) for way in WAYS],
)
def test_a_check_measures_and_leaves_nothing(way: str, launch: Callable[..., Launched]) -> None:
    command = [*WAYS[way], *([] if "--check" in WAYS[way] else ["--check"])]
    run = launch(*command)
    run.ok()
    parts = (
        "Plan (",
        "Resources (",
        "formula (eager, ",
        "fake tensors (the same step)",
        "verdict: fits, ",
        "For a bug report",
    )
    for part in parts:
        assert part in run.output
    for name in (
        "CPU",
        "open files",
        "host name",
        "clock",
        "data",
        "W&B",
        "versions",
        "memory of a step",
    ):
        assert re.search(rf"^  (ok|warning)  +{name}  ", run.output, re.MULTILINE), name
    assert run.output.rstrip().endswith("```")
    assert not run.run.path.exists() and not run.logs.exists()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.slow if way == "train.py" else pytest.mark.soak)
        for way in WAYS
    ],
)
def test_json_is_one_object_and_nothing_else(
    way: str, project: Path, tmp_path: Path, token: str
) -> None:
    command = [
        *WAYS[way],
        *([] if "--check" in WAYS[way] else ["--check"]),
        "--json",
        "--device=cpu",
        "--depth=1",
        f"--out_dir={tmp_path}/runs",
    ]
    environ = os.environ | {TOKEN: token, "WANDB_API_KEY": "k" * 40}
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["exit_code"], found["memory"]["verdict"]) in (
        ("ok", 0, "fits"),
        ("warning", 0, "fits"),
    )
    assert found["memory"]["measured_bytes"] > 0
    assert found["plan"]["ranks"] == (1 if way in ("launch_train", "train.py") else 2)
    assert "measuring the memory" in done.stderr
    assert "k" * 40 not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_json_of_a_machine_that_fails_a_check(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [
        "./train_dual_gpu.sh",
        QUICKSTART,
        "--check",
        "--json",
        "--device=cpu",
        f"--out_dir={tmp_path}/file",
    ]
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["status"], found["exit_code"]) == ("error", 3)
    (bad,) = [c for c in found["checks"] if c["status"] == "error"]
    assert (bad["name"], bad["fixes"]) == ("run folder", ["--out_dir=/another/folder"])


@pytest.mark.slow
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
