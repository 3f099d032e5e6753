"""The weights that the runs of a sweep start from (--init_from)."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit import trained_runs
from tests.unit.test_sweep import ended, prepared
from training.cli.sweep import board, session
from training.cli.sweep.prepare import Sweep
from training.core import rundir, standing
from training.core.errors import UserError
from training.core.messages import msg
from training.core.rundir import RunDir

WORDS = ("--init_from=base", "--matrix_lr=0.01,0.02")


@pytest.fixture
def base(tmp_path: Path) -> RunDir:
    trained_runs.made(tmp_path / "base", trained_runs.gpt(1))
    return RunDir(tmp_path / "base")


@pytest.fixture
def first(base: RunDir, tmp_path: Path) -> Sweep:
    """A sweep that has begun; the run that it starts from has replaced the weights."""
    made = prepared(tmp_path, *WORDS)
    made.folder.create(made.record)
    assert prepared(tmp_path, *WORDS).known
    replaced(base)
    shutil.rmtree(Path(made.record["runs"][0]["init_from"]).parent)
    return made


def replaced(run: RunDir) -> None:
    """It has a newer checkpoint."""
    model = trained_runs.gpt(1)
    trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), 8)


def begin(sweep: Sweep) -> list[str]:
    """The codes of its problems."""
    try:
        session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=False).begin()
    except UserError as error:
        return [problem.code for problem in error.problems]
    return []


def test_a_sweep_without_its_weights_begins_another_one(first: Sweep, tmp_path: Path) -> None:
    other = prepared(tmp_path, *WORDS)
    assert (other.known, other.folder.name) == (False, f"{first.folder.name}_2")
    assert begin(first) == ["sweep.weights_lost"]
    ended(first, 0, "done")
    assert begin(first) == ["sweep.weights_lost"], "a finished run is not continued"
    with pytest.raises(UserError) as raised:
        prepared(tmp_path, *WORDS, f"--name={first.folder.name}")
    assert not any("--resume" in fix for fix in raised.value.problems[0].fixes)
    ended(first, 1, "done")
    assert prepared(tmp_path, *WORDS).known and begin(first) == []


def test_runs_with_a_checkpoint_are_continued_without_the_weights(
    first: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / first.record["runs"][0]["name"])
    run.create()  # it ended before its first checkpoint
    assert begin(first) == ["sweep.weights_lost"] and not prepared(tmp_path, *WORDS).known
    replaced(run)
    capsys.readouterr()
    assert begin(first) == [] and prepared(tmp_path, *WORDS).known
    lost = msg("cli.sweep.weights_lost", file=first.record["runs"][1]["init_from"])
    assert lost in " ".join(capsys.readouterr().err.split())


def test_weights_of_a_run_that_is_being_trained_may_be_replaced(
    base: RunDir, tmp_path: Path
) -> None:
    warning = msg("cli.sweep.weights_replaced", name="base")
    assert warning not in prepared(tmp_path, *WORDS).warnings
    base.summary.unlink(missing_ok=True)
    me = {**standing.identity(os.getpid()), "started": time.time(), "ranks": []}
    rundir.write_json(base.supervisor, me)
    assert warning in prepared(tmp_path, *WORDS).warnings
    assert warning not in prepared(tmp_path, *WORDS, "--jobs=2").warnings  # all begin at once
