"""The disk of the run folder: room for the checkpoints that are still to be written."""

from __future__ import annotations

import os
import shlex
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ask
from tests.unit.test_resuming import run_of
from training.core import manifest
from training.plan.preflight import ERROR, OK, Check, folder_checks

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30
STEP: Any = SimpleNamespace(stored=GIB)


def checked(monkeypatch: pytest.MonkeyPatch, free: float, *args: str) -> Check:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(free * GIB)))
    return folder_checks.run_folder(ask("--device=cpu", *args), STEP)


def needed(*args: str) -> int:
    """Checkpoints of which a new run needs the room."""
    with pytest.MonkeyPatch.context() as patch:
        return next(n for n in range(99) if checked(patch, n + 0.1, *args).status == OK)


@each(
    ("args", "checkpoints"),
    [
        ((), 3),  # one more exists while it is written
        (("--keep_checkpoints=5", "--keep_best"), 7),
        # as many as the run writes
        (("--keep_checkpoints=50", "--num_iterations=1000", "--save_every=100"), 10),
        (("--keep_checkpoints=50", "--num_iterations=1001", "--save_every=100"), 11),
        (("--keep_checkpoints=50", "--num_iterations=1000", "--save_every=0"), 1),
        (
            (
                *("--keep_checkpoints=50", "--num_iterations=1000", "--save_every=500"),
                *("--keep_best", "--eval_every=250"),
            ),
            6,
        ),
        (("--keep_checkpoints=50", "--save_every=100"), 51),  # the steps are unknown
    ],
)
def test_a_new_run(args: tuple[str, ...], checkpoints: int) -> None:
    assert needed(*args) == checkpoints


@each(
    ("there", "steps", "checkpoints"),
    [
        ((), 0, 3),
        ((100,), 0, 2),
        ((100, 200), 0, 1),
        ((100, 200, 300, 350), 0, 1),
        ((350,), 400, 1),  # its last step
        ((250,), 400, 2),
    ],
)
def test_a_resumed_run_has_checkpoints(
    there: tuple[int, ...], steps: int, checkpoints: int, home: Path
) -> None:
    name = f"run of {steps} {there}"
    run = run_of(home, name, steps=max(there, default=0), num_iterations=steps, save_every=100)
    for step in there[:-1]:
        (run.checkpoints / manifest.folder_name(step)).mkdir()
    assert needed(f"--resume={name}") == checkpoints


def test_a_resumed_run_stays_in_its_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "other disk", "r1", steps=100)
    found = checked(monkeypatch, 0, f"--resume={run.path}")
    assert found.status == ERROR and str(run.path) in found.text
    assert found.fixes and not any("out_dir" in fix for fix in found.fixes)
    assert checked(monkeypatch, 0).fixes == ["--out_dir=/another/folder"]


def test_the_files_of_a_resumed_run_are_writable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared folder they may be another user's."""
    run = run_of(home, "r1", steps=100)
    run.events.touch()
    asked = f"--resume={run.path}"
    assert checked(monkeypatch, 9, asked).status == OK
    monkeypatch.setattr(os, "access", lambda path, mode: path != run.events)
    found = checked(monkeypatch, 9, asked)
    assert found.status == ERROR and str(run.events) in found.text
    assert [shlex.split(fix)[:2] for fix in found.fixes] == [["chmod", "g+w"], ["cp", "-a"]]
    assert found.fixes[1].endswith(f" --resume=/another/folder/{run.name}")
    run.events.unlink()
    assert checked(monkeypatch, 9, asked).status == OK
