"""Which folders of experiments/ are runs, and which was planned last (training.core.find_run)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.core import find_run, rundir
from training.core.find_run import RunSelector
from training.core.rundir import RunDir


def test_the_newest_run_is_the_one_planned_last(tmp_path: Path) -> None:
    assert find_run.newest(tmp_path) is None
    assert find_run.newest(tmp_path / "missing") is None
    for name, age in (("b", 1000), ("a", 3000), ("c", 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
        os.utime(tmp_path / name / "plan.json", (10_000 - age, 10_000 - age))
    (tmp_path / "no plan").mkdir()
    newest = find_run.newest(tmp_path)
    assert newest is not None
    assert newest.name == "b"


def test_a_folder_that_cannot_be_examined_hides_no_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rundir.write_json(RunDir(tmp_path / name).plan, {})
    os.utime(RunDir(tmp_path / "b").plan, (1, 1))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    (tmp_path / "through").symlink_to("file/x")
    assert sorted(path.name for path in find_run.folders(tmp_path)) == ["a", "b"]
    newest = find_run.newest(tmp_path)
    assert newest and newest.name == "a"
    assert find_run.planned(tmp_path / "missing") == []


@pytest.mark.parametrize("typed", ["..", "../", ".", "../.", "../checkpoints/.."])
def test_a_run_above_the_current_directory_has_its_name(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run1")
    run.create()
    rundir.write_json(run.plan, {})
    monkeypatch.chdir(run.path if typed == "." else run.checkpoints)
    found = find_run.find(typed, tmp_path, RunSelector("RUN", "./duet archive ", "latest"))
    assert found.path == run.path
