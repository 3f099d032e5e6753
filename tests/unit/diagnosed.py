"""Runs and logs that `./duet diagnose` is called with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training.core.rundir import RunDir, write_json

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "fixtures" / "logs"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
    "capacity of 31.37 GiB\n"
)
START_S = 1.7e9  # of a run with a console log
KEY = "0123456789abcdef0123456789abcdef01234567"


def plan(**more: Any) -> dict[str, Any]:
    values = {
        "total_batch_size": 512,
        "device_batch_size": 8,
        "num_workers": 2,
        "out_dir": "experiments",
        "log_dir": "logs",
    }
    return {
        "config": values | {"find_unused_parameters": False},
        "origins": dict.fromkeys(values, "default"),
        "command": {"script": "launch_train.sh", "args": []},
        "ranks": 2,
        "batch": {"device_sequences": 8, "seq_len": 32, "world_size": 2, "accumulation": 1},
        "memory": {"total_bytes": 10 << 30},
        "gpus": [],
    } | more


def new_run(folder: Path, name: str = "run", **more: Any) -> RunDir:
    made = RunDir(folder / "experiments" / name)
    made.create()
    write_json(made.plan, plan(**more))
    return made


def names(run: RunDir, at: float = START_S) -> str:
    """The line of a start in the launcher's console."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"[INFO] {clock} run directory: {run.path}\n"


def asked(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "lib" / "run_module.py"), "training.cli.diagnose", *args]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ | env, check=False)
