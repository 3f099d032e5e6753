"""Ranks that torchrun starts again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit import trained_runs
from tests.unit.conftest import LAUNCH, ask, only, wrong
from tests.unit.test_init_from_again import CPU, begun_from
from tests.unit.trained_runs import gpt, made
from training.cli import draft, restarted
from training.core import standing
from training.core.errors import Exit
from training.core.rundir import ASKED, RunDir, read_json, write_json
from training.plan.preflight import startup_checks

AGENT = standing.identity(1)


def begun_by(agents: list[Any], folder: Path, args: list[str]) -> RunDir:
    """A run that the agents of torchrun have begun with `args`."""
    run = made(folder / "begun", gpt(2, length=32))
    plan = read_json(run.plan) or {}
    command = {"script": "train.py", "args": args}
    write_json(run.plan, {**plan, "launch": "1", "agents": agents, "command": command})
    return run


@each("step", [0, 7])
def test_the_flags_of_the_first_start_are_not_a_contradiction(step: int, tmp_path: Path) -> None:
    """`step`: of the checkpoint they resume from; without one they start from the same weights."""
    model = gpt(2, length=32)
    base = made(tmp_path / "base", model)
    run = begun_from(tmp_path, "latest")
    trained_runs.checkpoint(base, model.state_dict(), asdict(model.shape), 8)
    words = (*CPU, "--init_from=latest", f"--out_dir={tmp_path}")
    of_user = {"DUET_RESUME": str(run.path)}
    if step:
        trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), step)
        problem = only(wrong(*words, script=LAUNCH, env=of_user))
        assert problem.code == "flag.contradiction"
    asked = ask(*words, script=LAUNCH, env=of_user | {"DUET_RESTARTED": "1"})
    assert asked.resume_from and asked.resume_from.path == run.path
    assert (asked.start.step if asked.start else None) == (None if step else 7)


@each(
    ("file", "end", "code"),
    [
        ("summary", {"status": "done", "exit_code": 0}, Exit.DONE),
        ("summary", {"status": "stopped", "exit_code": 75}, Exit.PREEMPTED),
        ("summary", {"status": "stopped", "exit_code": 130}, Exit.INTERRUPTED),
        ("failure", {"kind": ASKED, "exit_code": 130}, Exit.INTERRUPTED),
        # torchrun has stopped the ranks, since one was lost before the training began
        ("failure", {"kind": ASKED, "exit_code": 75}, None),
        ("failure", {"kind": "error", "exit_code": 4}, None),
        ("failure", {}, None),
    ],
)
def test_a_run_that_has_not_failed_is_not_resumed(
    file: str, end: dict[str, Any], code: int | None, tmp_path: Path
) -> None:
    """Its rank may have crashed after the end, and torchrun restarts what ends with 75, too."""
    args = [f"--out_dir={tmp_path}"]
    run = begun_by([AGENT], tmp_path, args)
    if end:
        write_json(getattr(run, file), {**end, "launch": "1"})
    environ = {"RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert restarted.resume("train.py", args, environ, AGENT) == code
    assert environ.get(restarted.RESUME) == (str(run.path) if code is None else None)


@each(
    ("then", "now", "code", "left"),
    [(1, 2, 75, False), (2, 1, 75, False), (2, 2, 75, False), (2, 2, 130, True), (2, 2, 0, True)],
)
def test_torchrun_stops_its_ranks_when_machines_come_or_go(
    then: int, now: int, code: int, left: bool, tmp_path: Path
) -> None:
    args = [f"--out_dir={tmp_path}"]
    run = begun_by([AGENT, {**AGENT, "host": "b"}][:then], tmp_path, args)
    end = {"status": "stopped" if code else "done", "exit_code": code, "launch": "1"}
    write_json(run.summary, end)
    environ = {"RANK": "1", "GROUP_WORLD_SIZE": str(now)}
    assert restarted.resume("train.py", args, environ, AGENT) == (code if left else None)
    assert (restarted.RESUME in environ) == (not left)


@each(
    ("then", "count", "machines", "again"),
    [
        ("a", "1", 1, True),
        (None, "1", 1, True),  # of an earlier version
        ("b", "1", 1, False),
        ("a", "0", 1, False),
        ("a", "0", 2, True),  # torchrun does not count those for machines that come or go
        ("b", "0", 2, False),
    ],
)
def test_a_second_training_of_a_process_is_not_a_restart(
    then: str | None, count: str, machines: int, again: bool, tmp_path: Path
) -> None:
    """A notebook calls elastic_launch twice. `then`: the run ID of the first training."""
    run = begun_by([AGENT], tmp_path, [f"--out_dir={tmp_path}"])
    if then:
        write_json(run.plan, {**(read_json(run.plan) or {}), "torchrun_id": then})
    environ = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": count}
    environ |= {"RANK": "0", "GROUP_WORLD_SIZE": str(machines)}
    assert restarted.resume("train.py", [f"--out_dir={tmp_path}"], environ, AGENT) is None
    assert (restarted.RESUME in environ) == again


def test_a_rank_with_nothing_to_resume_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarted, "resume", lambda *of: 75)
    environ = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}
    assert draft.draft([f"--out_dir={tmp_path}"], environ, 1) == 75


def test_restarted_ranks_do_not_wait_for_silence_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun has ended it, on all machines."""
    run = begun_by([AGENT], tmp_path, [])
    starter = {**AGENT, "host": "another"}
    write_json(run.plan, {**(read_json(run.plan) or {}), "starter": starter})
    run.event("resume", step=0)
    (check,) = startup_checks.not_running(run, waits=False)
    assert check.status == "warning"
    monkeypatch.setenv("DUET_RESTARTED", "1")
    assert startup_checks.not_running(run, waits=False) == []
    monkeypatch.setattr(startup_checks.running, "pid_of", lambda run: 7)
    (check,) = startup_checks.not_running(run, waits=True)
    assert check.status == "error"
