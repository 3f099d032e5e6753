"""A sweep on two null GPUs: one run on each of them at the same time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOKEN, wait_until
from tests.e2e.conftest import TINY
from tests.null_gpu.conftest import NullGpus
from tests.null_gpu.test_fewer_ranks import LOST
from training.core import manifest
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json, read_records

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(gpus: NullGpus, project: Path, tmp_path: Path, token: str) -> Iterator[Begin]:
    """Start a sweep of three runs on two null GPUs."""
    started: list[subprocess.Popen[str]] = []
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
    values = TINY | {"device": "auto", "data": text, "compile": 0, "sample_tokens": 0}
    # Checksums that nothing computes are what the memory contained.
    values |= {"inspect_every": 0}
    values |= {"out_dir": tmp_path / "runs", "log_dir": tmp_path / "logs"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_"))}
    counts = {"NULL_GPU_COUNT": "2", "FAKE_NVML_COUNT": "2", TOKEN: token}

    def start(**more: object) -> subprocess.Popen[str]:
        words = [f"--{name}={value}" for name, value in (values | more).items()]
        sweep = subprocess.Popen(
            ["./duet", "sweep", *words, "--seed=1,2,3", "--name=three"],
            cwd=project,
            env=env | gpus.environ | counts,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(sweep)
        return sweep

    yield start
    for sweep in started:
        if sweep.poll() is None:
            sweep.terminate()
        sweep.communicate()


def indices(plan: dict[str, Any]) -> list[int]:
    return [gpu["index"] for gpu in plan["gpus"]]


def test_each_run_has_a_gpu_of_its_own(begin: Begin, tmp_path: Path) -> None:
    sweep = begin(num_iterations=300)  # seconds, also if the second run starts late
    output = sweep.communicate(timeout=300)[0]
    assert sweep.returncode == Exit.DONE, output
    runs = [RunDir(tmp_path / f"runs/three_seed-{seed}") for seed in (1, 2, 3)]
    plans = [read_json(run.plan) or {} for run in runs]
    assert {plan["device"]["value"] for plan in plans} == {"cuda"}
    used = [indices(plan) for plan in plans]
    assert used[:2] == [[0], [1]] and used[2] in ([0], [1])
    # the second one began before the first one ended
    ends = [(read_json(run.summary) or {})["time"] for run in runs]
    begun = [next(read_records(run.events))["time"] for run in runs]
    assert max(begun[:2]) < min(ends[:2]) and begun[2] > min(ends[:2])


def test_a_lost_gpu_does_not_fail_the_rest(begin: Begin, gpus: NullGpus, tmp_path: Path) -> None:
    sweep = begin(num_iterations=300, save_every=20)
    runs = [RunDir(tmp_path / f"runs/three_seed-{seed}") for seed in (1, 2, 3)]
    saved = runs[1].checkpoints
    wait_until(lambda: bool(manifest.all_in(saved)) or sweep.poll() is not None, 120, "checkpoint")
    gpus.break_down(1, LOST)
    output = sweep.communicate(timeout=300)[0]
    assert sweep.returncode == Exit.DONE, output
    assert [indices(read_json(run.plan) or {}) for run in runs] == [[0], [0], [0]]
    resumed = [r for r in read_records(runs[1].events) if r["event"] == "resume"]
    assert len(resumed) == 1, "from its checkpoint"
