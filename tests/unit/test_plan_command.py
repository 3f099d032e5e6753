"""training.plan.training_plan as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_a_launch_script_that_was_killed_gets_no_plan(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [
        "configs/dual_gpu/quickstart.py",
        "--device=cpu",
        "--run_name=unused",
        f"--out_dir={tmp_path}",
        f"--log_dir={tmp_path}/logs",
    ]
    command = [
        sys.executable,
        "lib/run_module.py",
        "training.cli.plan",
        "train_dual_gpu.sh",
        *words,
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (130, "")
    assert not (tmp_path / "unused").exists()
