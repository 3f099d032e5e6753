"""Which folders of experiments/ are runs, and which was planned last (training.core.find_run)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import wrong
from training.core import find_run, owner, rundir
from training.core.errors import Exit, UserError
from training.core.find_run import RunSelector
from training.core.messages import msg
from training.core.rundir import RunDir

ASKER = RunSelector("RUN", "./duet archive ", "latest")


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


def test_a_path_as_it_was_typed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, now = tmp_path / "first", tmp_path / "now"
    for place in (first / "a", first / "b", now / "b", now / "c"):
        place.mkdir(parents=True)
    monkeypatch.chdir(now)
    (now / "same").symlink_to(first / "a")
    (first / "same").symlink_to("a")
    plan: Any = {"command": {"script": "", "args": [], "cwd": str(first)}}
    moved = {name: str(first / name) for name in ("a", "b")}
    for typed in ("a", "b", "c", "d", "same", "", "~no-such-user/a", str(now / "b")):
        assert find_run.as_started(typed, plan) == moved.get(typed, typed)
        without: Any = {}
        assert find_run.as_started(typed, without) == typed


@pytest.mark.parametrize("typed", ["..", "../", ".", "../.", "../checkpoints/.."])
def test_a_run_above_the_current_directory_has_its_name(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run1")
    run.create()
    rundir.write_json(run.plan, {})
    monkeypatch.chdir(run.path if typed == "." else run.checkpoints)
    found = find_run.find(typed, tmp_path, ASKER)
    assert found.path == run.path


def test_a_run_that_may_not_be_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one written with umask 077, or below a home folder of mode 711 or 700."""
    experiments = home / "experiments"
    for folder in (experiments / "private", tmp_path / "711", tmp_path / "700"):
        folder.mkdir(parents=True)
    modes = {"private": 0, "711": os.X_OK, "700": 0}

    def access(path: Path, wanted: int) -> bool:
        return wanted & modes.get(path.name, wanted) == wanted

    monkeypatch.setattr(os, "access", access)
    for word, closed in (
        ("private", experiments / "private"),
        (str(experiments / "private"), experiments / "private"),
        (str(tmp_path / "700/experiments/x"), tmp_path / "700"),
        (str(tmp_path / "711"), tmp_path / "711"),
        (str(tmp_path / "711/experiments/x"), None),
        ("missing", None),
    ):
        with pytest.raises(UserError) as caught:
            find_run.find(word, experiments, ASKER)
        (problem,) = caught.value.problems
        code, status = ("run.closed", 3) if closed else ("run.missing", 2)
        assert (problem.code, caught.value.code) == (code, Exit(status)), word
        what = (
            msg("core.find_run.closed", folder=closed, user=owner.name(closed))
            if closed
            else msg("core.find_run.not_a_run")
        )
        assert what in problem.what, word
        assert [str(closed) in fix for fix in problem.fixes if "chmod" in fix] == (
            [True] if closed and word.endswith(closed.name) else []
        )
        assert [one.code for one in wrong(f"--resume={word}")] == [code], word
