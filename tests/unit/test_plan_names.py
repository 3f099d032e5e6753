"""The folder of a new run: its name is free, taken meanwhile, or left by a start that was killed; a
disk that refuses a file of a start."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED
from tests.unit.test_plan import make
from tests.unit.test_plan_files import folders, written
from training.core import rundir, standing
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir, read_json, write_json
from training.launcher import rendezvous
from training.plan import writer

__all__ = ["folders"]


def test_a_run_name_is_refused_also_if_another_launch_takes_it_meanwhile(
    folders: list[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both plans have found it free; one that gets another name would be mistaken for the first."""
    made, others = Path.mkdir, list[Path]()

    def second(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "same" and not others:
            others.append(path)
            written(*folders, "--run_name=same")
        made(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", second)
    with pytest.raises(UserError, match=r"'same'.*already exists"):
        written(*folders, "--run_name=same")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["same"]


def test_a_run_name_is_free_again_when_the_other_launch_withdraws(
    folders: list[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the refusal of its folder and the search for the reason."""
    made, refused = Path.mkdir, list[Path]()

    def withdrawn(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "same" and not refused:
            refused.append(path)
            raise FileExistsError
        made(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", withdrawn)
    assert written(*folders, "--run_name=same").name == "same" and refused


@pytest.mark.parametrize("killed", ["before", "within"])
def test_a_start_killed_before_its_plan_does_not_take_the_name(
    killed: str, folders: list[str], tmp_path: Path
) -> None:
    """The same command with --resume=auto could neither begin nor resume the run."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    if killed == "within":
        run.create()
        write_json(run.preflight, {"checks": []})
        (run.path / ".plan.json.abcdefgh").touch()
    auto = ["--run_name=mine", "--resume=auto"]
    assert written(*folders, *auto) == run.path
    assert not (read_json(run.plan) or {})["resume"]
    assert written(*folders, *auto) == run.path
    assert (read_json(run.plan) or {})["resume"]


def test_of_two_starts_in_such_a_folder_one_is_refused(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    name = "--run_name=mine"
    asked, plan, checks = make("--device=cpu", "--depth=1", *folders, name, script=ENHANCED)
    first = written(*folders, name) / "plan.json"
    before = first.read_bytes()
    with pytest.raises(UserError, match=r"'mine'.*already exists"):
        writer.write(plan, checks, asked, rendezvous.ask, os.getpid())
    assert first.read_bytes() == before


def test_a_folder_with_anything_else_is_taken(folders: list[str], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "mine")
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    with pytest.raises(UserError, match=r"'mine'.*already exists"):
        written(*folders, "--run_name=mine")


@pytest.mark.parametrize(
    ("resumed", "file"),
    [
        (False, "preflight.json"),
        (False, "plan.json"),
        (True, "data.before.json"),
        (True, "plan.before.json"),
        (True, "plan.json"),
    ],
)
def test_a_disk_that_refuses_a_file_leaves_no_trace_of_the_start(
    file: str, folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumed: bool
) -> None:
    flag = "--run_name=mine"
    if resumed:
        run = RunDir(written(*folders, flag))
        write_json(run.data, {"total_steps": 7})
        flag = "--resume=mine"
    logs = sorted((tmp_path / "logs").glob("*"))
    kept = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.json")}
    write = rundir.write_bytes

    def full(path: Path, *args: Any) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{path.parent}/.{file}.x")
        write(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(rundir, "write_bytes", full)
        with pytest.raises(UserError, match=re.escape(f"{tmp_path}/runs/mine: No space")) as caught:
            written(*folders, flag)
    assert caught.value.code == Exit.RESOURCES
    assert sorted((tmp_path / "logs").glob("*")) == logs
    if resumed:
        assert all(path.read_bytes() == kept[path] for path in (run.plan, run.data))
        assert standing.read_plan(run) and standing.data_file(run) == run.data
    else:
        assert not any((tmp_path / "runs").iterdir())
    assert written(*folders, flag) == tmp_path / "runs" / "mine"
