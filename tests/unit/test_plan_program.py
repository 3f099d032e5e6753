"""The planner as a program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, python


def plan_program(*args: str, cwd: Path, **variables: str) -> Any:
    return python(
        "-m",
        "training.cli.plan",
        ENHANCED,
        "--device=cpu",
        "--depth=1",
        *args,
        cwd=cwd,
        **variables,
    )


def test_it_prints_the_run_directory_and_nothing_else(tmp_path: Path) -> None:
    done = plan_program("--out_dir=runs", "--log_dir=logs", "--run_name=r", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/runs/r\n", "")
    assert (tmp_path / "runs/r/plan.json").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--depht=1"], 2),
        (["--total_batch_size=7"], 2),
        (["--log_dir=file/logs"], 3),
        (["--out_dir=link"], 3),
        (["--log_dir=link/logs"], 3),
        (["--depth=256"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_problems_go_to_standard_error_and_nothing_is_made(
    args: list[str], code: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    defaults = [
        f for f in ("--out_dir=runs", "--log_dir=logs") if f.partition("=")[0] not in args[0]
    ]
    done = python(
        "-m", "training.cli.plan", ENHANCED, "--device=cpu", *defaults, *args, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert f"nothing was launched (exit {code})" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = plan_program("--dry_run", "--out_dir=runs", "--log_dir=logs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan (dry run")
    assert os.listdir(tmp_path) == []
    (tmp_path / "runs").touch()
    failing = plan_program("--dry_run", "--out_dir=runs", "--log_dir=logs", cwd=tmp_path)
    assert failing.returncode == 3
    assert "is not a folder" in failing.stdout


def test_a_data_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("some text")
    done = plan_program(
        "--out_dir=runs", "--log_dir=logs", "--run_name=r", f"--data={name}", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
