"""training.plan.training_plan as a program."""

from __future__ import annotations

import os
import shlex
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


def test_a_current_directory_that_was_removed(tmp_path: Path) -> None:
    program = f'cd {shlex.quote(str(tmp_path))}; mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    run_module = [sys.executable, str(ROOT / "lib/run_module.py"), "training.cli.plan"]
    command = [*run_module, "train_dual_gpu.sh", "--device=cpu"]
    done = subprocess.run(
        ["sh", "-c", program, "sh", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"the current directory {tmp_path}/gone was removed" in done.stderr
