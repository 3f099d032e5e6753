"""A copy of a run that is starting or running: the processes are not its own."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.test_sweep import prepared
from training.cli import archive
from training.cli.cleaning import selection
from training.cli.sweep import board, prepare, session
from training.cli.sweep.options import SweepOptions
from training.cli.sweep.prepare import Sweep
from training.core import rundir, standing
from training.core.errors import UserError
from training.core.messages import msg
from training.core.rundir import RunDir
from training.diagnose import run_files
from training.monitor.runs import facts
from training.monitor.state import RunWatch
from training.plan import resume_run, running


@pytest.fixture(params=[True, False], ids=["running", "starting"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    me = standing.identity(os.getpid())
    made = Made(tmp_path / "experiments" / "origin", age_s=9000, starter=me)
    if request.param:
        made.steps(5).supervisor(os.getpid()).beats(age_s=selection.HIDDEN_S)
        rundir.write_json(made.run.supervisor, (rundir.read_json(made.run.supervisor) or {}) | me)
    assert facts.read(made.run.path).state == ("running" if request.param else "starting")
    return made


def test_a_copy_has_no_processes(made: Made) -> None:
    copy = RunDir(shutil.copytree(made.run.path, made.run.path.with_name("copy")))
    found = facts.read(copy.path)
    assert found.state == "died" and str(made.run.path) in (found.reason or "")
    seen = RunWatch(copy).read()
    assert not any(rank["alive"] for rank in seen["ranks"])
    assert not seen["run"]["supervisor_alive"] and run_files.alive(copy) == ""
    assert standing.starter(copy) is None and running.pid_of(copy) is None
    assert archive.options([str(copy.path)], copy.path.parent.parent).run.path == copy.path
    assert selection.untouchable(facts.read(copy.path)) == ""
    if copy.supervisor.exists():
        (vanished,) = run_files.reported(copy)
        assert str(made.run.path) in vanished.text


def test_a_copy_is_not_running_in_a_list_of_runs_to_resume(made: Made) -> None:
    copy = RunDir(shutil.copytree(made.run.path, made.run.path.with_name("copy")))
    for run, state in ((made.run, msg("plan.state.running")), (copy, msg("plan.state.died"))):
        plan = standing.read_plan(run)
        assert plan and resume_run._where(run, plan).startswith(state)


def test_a_copied_sweep_does_not_end_runs_of_the_original(tmp_path: Path) -> None:
    first, copied = tmp_path / "experiments", tmp_path / "copy"
    sweep = prepared(first, "--depth=1,2")
    sweep.folder.create(sweep.record)
    run = Made(first / sweep.record["runs"][0]["name"]).steps(5).run
    me = {**standing.identity(os.getpid()), "started": time.time(), "ranks": []}
    rundir.write_json(run.supervisor, me)
    shutil.copytree(first, copied)
    for folder, codes in ((first, ["sweep.running"]), (copied, [])):
        assert refused(prepare.resume(SweepOptions(resume=sweep.folder.name), {}, folder)) == codes


def refused(sweep: Sweep) -> list[str]:
    try:
        session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=False).begin()
    except UserError as error:
        return [problem.code for problem in error.problems]
    return []


def test_a_moved_run_keeps_its_processes(made: Made) -> None:
    moved = RunDir(made.run.path.rename(made.run.path.with_name("moved")))
    assert facts.read(moved.path).state in facts.LIVE
    assert standing.starter(moved) == os.getpid()
    assert_refused(moved)


def test_a_moved_run_keeps_them_if_its_name_is_used_again(made: Made) -> None:
    moved = RunDir(made.run.path.rename(made.run.path.with_name("moved")))
    Made(made.run.path, age_s=100)
    assert facts.read(moved.path).state in facts.LIVE
    assert standing.starter(moved) == os.getpid()
    assert_refused(moved)


def assert_refused(moved: RunDir) -> None:
    with pytest.raises(UserError) as caught:
        archive.options([str(moved.path)], moved.path.parent.parent)
    assert [problem.code for problem in caught.value.problems] == ["run.live"]
