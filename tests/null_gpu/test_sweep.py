"""A sweep on two null GPUs: one run on each of them at the same time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.conftest import TOKEN
from tests.e2e.conftest import TINY
from tests.null_gpu.conftest import NullGpus
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json, read_records


def test_each_run_has_a_gpu_of_its_own(
    gpus: NullGpus, project: Path, tmp_path: Path, token: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
    values = TINY | {"device": "auto", "data": text, "compile": 0, "sample_tokens": 0}
    values |= {"out_dir": tmp_path / "runs", "log_dir": tmp_path / "logs"}
    words = [f"--{name}={value}" for name, value in values.items()]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_"))}
    counts = {"NULL_GPU_COUNT": "2", "FAKE_NVML_COUNT": "2", TOKEN: token}
    done = subprocess.run(
        ["./duet", "sweep", *words, "--seed=1,2,3", "--name=three"],
        cwd=project,
        env=env | gpus.environ | counts,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == Exit.DONE, done.stderr
    runs = [RunDir(tmp_path / f"runs/three_seed-{seed}") for seed in (1, 2, 3)]
    plans = [read_json(run.plan) or {} for run in runs]
    assert {plan["device"]["value"] for plan in plans} == {"cuda"}
    used = [[gpu["index"] for gpu in plan["gpus"]] for plan in plans]
    assert used[:2] == [[0], [1]] and used[2] in ([0], [1])
    # the second one began before the first one ended
    ends = [(read_json(run.summary) or {})["time"] for run in runs]
    begun = [next(read_records(run.events))["time"] for run in runs]
    assert max(begun[:2]) < min(ends[:2]) and begun[2] > min(ends[:2])
