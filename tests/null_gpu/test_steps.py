"""What a training step asks of a GPU: calls counted by the null GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TOKEN
from tests.null_gpu.conftest import CUDA_TORCH, NullGpus
from tests.slurm.cluster import free_ports

STEPS = 16
DDP_LOGS = 11  # the logger of DDP waits for the GPU in its first passes, and in every 100th


def counted(gpus: NullGpus, folder: Path, token: str, ranks: int) -> list[dict[str, int]]:
    """Calls of rank 0 in each step."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of the text\\n" for i in range(4000)))
    flags = {
        "depth": 2,
        "max_seq_len": 64,
        "device_batch_size": 4,
        "total_batch_size": 512,
        "num_iterations": STEPS,
        "eval_every": 0,
        "sample_tokens": 0,
        "compile": 0,
        "data": text,
        "out_dir": folder / "experiments",
        "run_name": "counted",
        "report": "false",
        "tensorboard": "false",
    }
    cluster = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(ranks),
    }
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | gpus.environ
    environ |= cluster | {"PYTHONPATH": str(CUDA_TORCH), TOKEN: token}
    programs = [
        subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests/null_gpu/count_steps.py"),
                str(folder / f"{rank}.json"),
                *(f"--{name}={value}" for name, value in flags.items()),
            ],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=(folder / f"{rank}.txt").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    codes = [program.wait(120) for program in programs]
    assert codes == [0] * ranks, (folder / "0.txt").read_text()[-2000:]
    steps: list[dict[str, int]] = json.loads((folder / "0.json").read_text())
    assert len(steps) == STEPS
    return steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_only_for_the_step_before(
    gpus: NullGpus, tmp_path: Path, token: str, ranks: int
) -> None:
    for step in counted(gpus, tmp_path, token, ranks)[DDP_LOGS:-1]:
        waits = {name: calls for name, calls in step.items() if name.startswith("SYNC")}
        assert waits == {"SYNC event": 1}, "its figures, read while the GPU has this step to do"
