"""The scaling check with real runs of one and two CPU ranks; they leave nothing, however it
ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TOKEN, wait_until
from tests.e2e.conftest import TINY
from tests.e2e.hooks import in_forward
from training.cli.scaling.experiment import FIXED
from training.core.rundir import RunDir, read_json, read_records

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Folder of the measured runs."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    return folder


@pytest.fixture
def start(project: Path, tmp_path: Path, temporary: Path, token: str) -> Start:
    def begin(*own: str, hook: str = "") -> subprocess.Popen[str]:
        values = [f"--{k}={v}" for k, v in TINY.items() if k not in FIXED]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_", "OMP_"))}
        env |= {TOKEN: token, "TMPDIR": str(temporary)}
        if hook:
            (tmp_path / "sitecustomize.py").write_text(hook)
            env["PYTHONPATH"] = str(tmp_path)
        argv = [
            sys.executable,
            "lib/run_module.py",
            "training.cli.scaling",
            "configs/dual_gpu/quickstart.py",
            "--ranks=1,2",
            *own,
            *values,
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv,
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    return begin


def left(temporary: Path) -> list[Path]:
    """Duet's temporary folders; torch keeps a separate cache next to them."""
    return list(temporary.glob("duet-scaling-*"))


@pytest.mark.slow
def test_one_and_two_ranks_are_measured(start: Start, temporary: Path) -> None:
    out, err = (check := start("--rounds=1", "--steps=20", "--json")).communicate(timeout=240)
    assert check.returncode == 0, err
    value = json.loads(out)
    one, two = value["results"]
    assert (one["ranks"], two["ranks"], value["device"], value["threads_per_rank"]) == (
        1,
        2,
        "cpu",
        1,
    )
    assert (
        one["step_ms"] > 0
        and two["speed_up_factor"] > 0
        and two["verdict"] in ("below", "in_band", "better")
    )
    assert value["parameters"] > 0 and two["gradients_gb_per_s_at_least"] > 0
    assert "one thread per rank (OMP_NUM_THREADS=1)" in err and "Traceback" not in err
    assert left(temporary) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_during_the_check(
    start: Start, temporary: Path, number: signal.Signals, status: int
) -> None:
    """The `token` fixture asserts that no process is left."""
    check = start("--rounds=1", "--steps=100000")

    def training() -> bool:
        return any(
            len(list(read_records(file))) > 2
            for file in temporary.glob("duet-scaling-*/run1/metrics.jsonl")
        )

    wait_until(lambda: training() or check.poll() is not None, what="the first run to train")
    check.send_signal(number)
    out, err = check.communicate(timeout=60)
    assert (check.returncode, out) == (status, ""), err
    assert "Traceback" not in err
    if number != signal.SIGKILL:
        assert "nothing is left behind" in err and left(temporary) == []


@pytest.mark.soak
def test_a_run_that_fails_is_shown_with_its_card_and_kept(start: Start, temporary: Path) -> None:
    check = start("--rounds=1", "--steps=10", hook=in_forward(1, 5, "raise ValueError('planted')"))
    out, err = check.communicate(timeout=120)
    assert (check.returncode, out) == (4, ""), err
    assert (
        "a run with 2 ranks failed (exit 4)" in err
        and "ValueError: planted" in err
        and "sitecustomize.py:" in err
    )
    assert "du et/launch_train.sh' 2 configs/dual_gpu/quickstart.py" in err
    (folder,) = left(temporary)
    assert f"Kept       {folder}" in err
    assert (read_json(RunDir(folder / "run2").failure) or {})["rank"] == 1
