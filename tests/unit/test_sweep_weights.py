"""The weights that the runs of a sweep start from (--init_from)."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit import trained_runs
from tests.unit.test_sweep import prepared
from training.cli.sweep import board, session
from training.core import rundir, standing
from training.core.errors import UserError
from training.core.messages import msg
from training.core.rundir import RunDir

WORDS = ("--init_from=base", "--matrix_lr=0.01,0.02")


@pytest.fixture
def base(tmp_path: Path) -> RunDir:
    trained_runs.made(tmp_path / "base", trained_runs.gpt(1))
    return RunDir(tmp_path / "base")


def test_a_sweep_without_its_weights_begins_another_one(base: RunDir, tmp_path: Path) -> None:
    first = prepared(tmp_path, *WORDS)
    first.folder.create(first.record)
    begun, waiting = first.record["runs"]
    assert prepared(tmp_path, *WORDS).known
    model = trained_runs.gpt(1)
    trained_runs.checkpoint(base, model.state_dict(), asdict(model.shape), 8)
    shutil.rmtree(Path(waiting["init_from"]).parent)  # replaced by that of step 8
    other = prepared(tmp_path, *WORDS)
    assert (other.known, other.folder.name) == (False, f"{first.folder.name}_2")
    todo = session.Session(first, board.Board(first, ascii_only=True), fail_fast=False)
    with pytest.raises(UserError) as raised:
        todo.begin()
    assert [problem.code for problem in raised.value.problems] == ["sweep.weights_lost"]
    for run in (begun, waiting):  # they have their own
        RunDir(tmp_path / run["name"]).create()
    todo.begin()
    assert prepared(tmp_path, *WORDS).known


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
