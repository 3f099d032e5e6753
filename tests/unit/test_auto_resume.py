"""`--resume=auto`: one command for the first start of a run and for its restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, SIMPLE, ask, only, wrong
from tests.unit.test_resuming import run_of
from training.core.errors import NothingToDo

COMMAND = ("--run_name=demo", "--resume=auto", "--device=cpu")


def test_the_first_start_begins_the_run_of_that_name(home: Path) -> None:
    run_of(home, "older", steps=20, status="stopped")
    found = ask(*COMMAND, script=ENHANCED)
    assert found.resume_from is None and found.config.run_name == "demo"


def test_a_restart_continues_it(home: Path) -> None:
    run = run_of(home, "demo", steps=20, status="stopped")
    run_of(home, "newer", steps=30, status="stopped")
    found = ask(*COMMAND, script=ENHANCED)
    assert found.resume_from and found.resume_from.path == run.path


def test_a_run_in_another_folder_is_found_there(home: Path) -> None:
    run_of(home, "demo", steps=20, status="stopped")
    (home / "out").mkdir()
    assert ask(*COMMAND, f"--out_dir={home}/out", script=ENHANCED).resume_from is None


def test_a_finished_run_ends_the_restarts(home: Path) -> None:
    run_of(home, "demo", steps=400, status="done")
    with pytest.raises(NothingToDo):
        ask(*COMMAND, script=ENHANCED)


def test_the_first_weights_are_those_of_the_first_start(home: Path) -> None:
    run_of(home, "demo", steps=20, status="stopped")
    found = ask(*COMMAND, "--init_from=elsewhere", script=ENHANCED)
    assert found.resume_from is not None and found.start is None
    words = ("--run_name=new", "--resume=auto", "--device=cpu", "--init_from=elsewhere")
    assert [problem.code for problem in wrong(*words)] == ["run.missing"]


def test_a_run_without_a_name_cannot_be_found_again(home: Path) -> None:
    problem = only(wrong("--resume=auto"))
    assert problem.code == "resume.no_name" and "--run_name=NAME" in problem.fixes[0]


def test_several_machines_agree_on_the_newest(home: Path) -> None:
    several = ("--nnodes=2", "--master_addr=a", "--total_batch_size=49152")
    problem = only(wrong(*several, "--run_name=demo", "--resume=auto"))
    assert problem.code == "resume.several_machines" and "--resume=latest" in problem.fixes[0]
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}
    words = ("2", *COMMAND, "--total_batch_size=49152")
    assert only(wrong(*words, script=LAUNCH, env=environ)).code == "resume.several_machines"


def test_the_first_start_needs_its_config(home: Path) -> None:
    assert [problem.code for problem in wrong(*COMMAND, script=SIMPLE)] == ["config.not_given"]
