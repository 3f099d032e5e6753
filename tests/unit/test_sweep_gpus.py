"""The GPUs of the runs of a sweep; without training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.test_sweep import TINY
from training.cli.sweep import options, slots
from training.cli.sweep.slots import Slot
from training.core.errors import Exit, UserError
from training.host.gpus import Gpu
from training.launcher import replan


def gpu(index: int, uuid: str = "") -> Gpu:
    return Gpu(index, uuid or f"GPU-{index}", "fake", 1 << 34, 1 << 34, 0, 30, 50.0)


@each(
    "count, per_run, asked, visible",
    [
        (4, 1, None, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        (4, 1, 2, ["GPU-0", "GPU-1"]),
        (5, 2, None, ["GPU-0,GPU-1", "GPU-2,GPU-3"]),
        (0, 1, None, [""]),
        (0, 1, 3, ["", "", ""]),
    ],
)
def test_each_run_side_by_side_has_gpus_of_its_own(
    count: int, per_run: int, asked: int | None, visible: list[str]
) -> None:
    chosen = options.SweepOptions(jobs=asked, gpus_per_run=per_run)
    found = slots.gpu_slots([gpu(i) for i in range(count)], per_run)
    assert [slot.visible for slot in slots.jobs(chosen, found, 9)] == visible
    assert [slot.visible for slot in slots.jobs(chosen, found, 1)] == visible[:1]


def test_instances_of_one_gpu_differ() -> None:
    """MIG: they have the number of their GPU. A list has entries of one kind, or CUDA ends it."""
    parts = [gpu(1, "MIG-a"), gpu(1, "MIG-b")]
    assert [slot.visible for slot in slots.gpu_slots(parts, 1)] == ["MIG-a", "MIG-b"]
    unknown = [gpu(0, "-"), gpu(1)]
    assert [slot.visible for slot in slots.gpu_slots(unknown, 2)] == ["0,1"]
    records = [part.record() for part in parts]
    assert replan.visible(records) == "MIG-a,MIG-b"


def test_more_jobs_than_gpus_are_refused() -> None:
    with pytest.raises(UserError) as raised:
        slots.jobs(options.SweepOptions(jobs=3, gpus_per_run=2), [Slot("GPU-0,GPU-1")], 9)
    assert raised.value.problems[0].code == "sweep.jobs"


def test_on_four_gpus_four_runs_are_planned_side_by_side(
    nvidia: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "lib/run_module.py", "training.cli.sweep", *TINY[:-2]),
            *("--device=cuda", "--seed=1,2,3,4,5", "--dry_run", f"--out_dir={tmp_path}"),
        ],
        cwd=ROOT,
        env=clean_environment() | nvidia(COUNT=4),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.DONE, done.stderr
    assert "GPU 0; GPU 1; GPU 2; GPU 3\n" in done.stdout
    assert list(tmp_path.iterdir()) == []
