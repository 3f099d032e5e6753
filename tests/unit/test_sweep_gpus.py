"""The GPUs of the runs of a sweep; without training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment, python
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


Nvidia = Callable[..., dict[str, Any]]


def dry_run(folder: Path, environ: dict[str, Any], *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [
            *(sys.executable, "lib/run_module.py", "training.cli.sweep", *TINY[:-2]),
            *("--tensorboard=false", *words, "--dry_run", f"--out_dir={folder}"),
        ],
        cwd=ROOT,
        env=clean_environment() | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_on_four_gpus_four_runs_are_planned_side_by_side(nvidia: Nvidia, tmp_path: Path) -> None:
    words = "--device=cuda", "--seed=1,2,3,4,5"
    code, out, err = dry_run(tmp_path, nvidia(COUNT=4), *words)
    assert code == Exit.DONE, err
    assert "GPU 0; GPU 1; GPU 2; GPU 3\n" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"COUNT": 2}, "GPU 1\n"),
        ({"COUNT": 4}, "GPU 1; GPU 2\n"),
        ({"COUNT": 4, "CUDA_VISIBLE_DEVICES": "3,2"}, "GPU 3; GPU 2\n"),
    ],
)
def test_fewer_runs_than_gpus_are_planned_on_the_emptiest(
    nvidia: Nvidia, tmp_path: Path, more: dict[str, Any], shown: str
) -> None:
    jobs = ["--jobs=1"] if more["COUNT"] == 2 else []
    environ = nvidia(FREE_GIB="0.5,30", **more)
    code, out, err = dry_run(tmp_path, environ, "--seed=1,2", *jobs)
    assert code == Exit.DONE, err
    assert shown in out


def test_a_full_gpu_is_left_out_before_its_process_is_killed(
    nvidia: Nvidia, tmp_path: Path
) -> None:
    environ = nvidia(COUNT=4, FREE_GIB="0.5,30", PROCESSES="1:30")
    code, _, err = dry_run(tmp_path, environ, "--device=cuda", "--seed=1,2,3,4,5", "--jobs=4")
    assert code == Exit.RESOURCES
    first, kill = (
        err.index("CUDA_VISIBLE_DEVICES=1,2,3 ./duet sweep --dry_run --depth=1"),
        err.index("kill 1"),
    )
    assert first < kill and "--jobs" not in err[first:kill]


def test_a_gpu_with_a_process_of_others_is_a_warning_once(nvidia: Nvidia, tmp_path: Path) -> None:
    environ = nvidia(COUNT=1, FREE_GIB="20", PROCESSES="1:11")
    code, _, err = dry_run(tmp_path, environ, "--device=cuda", "--seed=1,2,3")
    assert code == Exit.DONE
    assert err.count("[WARNING]") == err.count("pid 1 ") == 1, err


def test_the_driver_is_loaded_once_for_all_plans(nvidia: Nvidia, tmp_path: Path) -> None:
    code = f"""
import os, pynvml
from training.cli.sweep import options, prepare
depth, loads, init, end = 0, 0, pynvml.nvmlInit, pynvml.nvmlShutdown
def begins():
    global depth, loads
    loads, depth = loads + (not depth), depth + 1
    init()
def ends():
    global depth
    depth -= 1
    end()
pynvml.nvmlInit, pynvml.nvmlShutdown = begins, ends
argv = [*{TINY[:-2]!r}, "--tensorboard=false", "--device=cuda", "--seed=1,2,3,4,5",
        "--out_dir={tmp_path}"]
made = prepare.prepare(options.parse(argv), argv, os.environ)
print(loads, depth, made.jobs)"""
    done = python("-c", code, cwd=ROOT, **nvidia(COUNT=2))
    assert done.stdout.split() == ["2", "0", "2"], done.stderr


def test_runs_that_were_planned_on_gpus_stay_there(nvidia: Nvidia, tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from training.cli.sweep import board, options, prepare, session
from training.core.errors import UserError
folder = Path({str(tmp_path)!r})
argv = [*{TINY[:-2]!r}, "--tensorboard=false", "--device=auto,cpu", f"--out_dir={{folder}}"]
made = prepare.prepare(options.parse(argv), argv, os.environ)
made.folder.create(made.record)
todo = session.Session(made, board.Board(made, ascii_only=True), fail_fast=False)
first, second = made.record["runs"]
print(*(word for word in todo.command(first) if "device=" in word and "batch" not in word))
(folder / first["name"]).mkdir()
for run in (first, second):
    print(*(word for word in todo.command(run) if "device=" in word))
os.environ["FAKE_NVML_INIT"] = "9"
for begin in (
    lambda: prepare.resume(options.SweepOptions(resume=made.folder.name), os.environ, folder),
    lambda: prepare.prepare(options.parse(argv), argv, os.environ),
):
    try:
        begin()
    except UserError as error:
        print(int(error.code), error.problems[0].code, "Driver Not Loaded" in str(error))
"""
    done = python("-c", code, cwd=ROOT, **nvidia(COUNT=2))
    assert done.stdout.splitlines() == [
        "--device=cuda",
        "--device=cuda",
        "--device=cpu",
        *["3 preflight.gpus True"] * 2,
    ], done.stderr
