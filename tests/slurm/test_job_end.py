"""The end of a start of a job: its exit code, and whether it is requeued. No SLURM needed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from training.cli import submit
from training.core.errors import EXIT_MEANING, Exit
from training.core.rundir import RunDir, write_json
from training.diagnose.advice import of_end
from training.launcher.slurm import controller, job, submission


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def start(nodes: int = 1) -> dict[str, Any]:
    return {"time": time.time() - 1, "nodes": nodes}


def failed(code: int, cause: str = "unknown", age_s: float = 0) -> dict[str, Any]:
    return {"time": time.time() - age_s, "exit_code": code, "cause": cause}


def record(code: int, cause: str = "unknown", age_s: float = 0) -> str:
    return json.dumps(failed(code, cause, age_s))


@pytest.mark.parametrize("code", sorted(EXIT_MEANING))
def test_the_job_has_the_exit_code_of_the_launcher(run: RunDir, code: Exit) -> None:
    assert job.run_exit_code(run, start(), int(code)) == code


def test_killed_because_another_node_failed(run: RunDir) -> None:
    run.failure.write_text(record(5))
    assert job.run_exit_code(run, start(2), 143) == Exit.HANG, "srun reports the highest status"
    run.failure.write_text(record(5, age_s=60))
    assert job.run_exit_code(run, start(2), 143) == Exit.TRAINING, "of an earlier start"
    (run.path / "node1").mkdir()
    (run.path / "node1/failure.json").write_text(record(5))
    assert job.run_exit_code(run, start(2), 143) == Exit.HANG, "the first node has no record"
    assert job.run_exit_code(run, start(2), 75, elastic=True) == Exit.PREEMPTED, (
        "the run has continued without that node"
    )


def test_ranks_that_did_not_save_in_time_resume_from_the_last_checkpoint(run: RunDir) -> None:
    run.failure.write_text(record(4, "preempted"))
    assert job.run_exit_code(run, start(), 4) == Exit.PREEMPTED


def test_one_node_ended_before_the_other(run: RunDir) -> None:
    run.summary.write_text(json.dumps({"status": "stopped"}))
    assert job.run_exit_code(run, start(2), 143) == Exit.PREEMPTED
    assert job.run_exit_code(run, {"time": time.time() + 60, "nodes": 2}, 143) == Exit.TRAINING, (
        "of an earlier start"
    )


def test_a_finished_run_is_finished_with_any_status_of_srun(run: RunDir) -> None:
    run.summary.write_text(json.dumps({"status": "done"}))
    assert job.run_exit_code(run, start(2), 137) == Exit.DONE, "a slow report was killed"


def test_slurmctld_is_asked_again_while_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)'"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/was ] || {{ touch {tmp_path}/was; {away}; exit 1; }}\n"
        "[ $1 = requeue ] && { echo 'Requested operation is presently disabled'; exit 1; }\n"
        "echo JobState=RUNNING\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(controller, "RETRY_S", 0.01)
    assert job.state_of("7") == (job.RUNNING, True, False)
    answer = controller.ask("requeue", "7")
    assert (answer.status, answer.error) == (1, "Requested operation is presently disabled")
    (tmp_path / "was").unlink()
    monkeypatch.setattr(controller, "AWAY_S", 0.0)
    assert job.state_of("7") == (job.UNKNOWN, True, False)


@pytest.mark.parametrize(
    ("status", "code"),
    [(138, Exit.PREEMPTED), (143, Exit.PREEMPTED), (137, Exit.TRAINING), (1, Exit.TRAINING)],
)
def test_signals_before_there_is_a_supervisor(run: RunDir, status: int, code: Exit) -> None:
    assert job.run_exit_code(run, start(), status) == code


@pytest.mark.parametrize(
    ("kind", "answer", "steps", "requeued"),
    [
        ("silent", "Requeue=1", [0], True),
        ("silent", "Requeue=0", [0], False),
        ("silent", "Requeue=1", [0, 0], False),
        ("silent", "Requeue=1", [5, 0], True),
        ("gone", "Requeue=1", [0], False),
    ],
)
def test_a_silent_node_requeues_the_job(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    answer: str,
    steps: list[int],
    requeued: bool,
) -> None:
    """SLURM notices the node after minutes, when the job has ended."""
    run.failure.write_text(json.dumps({**failed(4), "kind": kind, "summary": "node 1 is lost"}))
    assert end(run, monkeypatch, steps, 4, f"JobState=RUNNING {answer}") == (4, requeued)
    assert ("not requeued: node 1 is lost" in capsys.readouterr().err) == (
        not requeued and answer == "Requeue=1"
    )


def test_only_the_advice_for_a_silent_node_is_to_wait_for_the_requeue() -> None:
    commands = {"resume_command": "./launch", "submit_command": "./submit"}
    ends: Any = [{"kind": kind, "cause": "peer_died"} for kind in ("silent", "gone")]
    silent, gone = (of_end(end, None, {}, commands) for end in ends)
    assert silent[0] == gone[0] and "requeued" in silent[1]
    assert gone[1].endswith(": ./submit") and "requeued" not in gone[1]
    del commands["submit_command"]
    silent, gone = (of_end(end, None, {}, commands) for end in ends)
    assert silent == gone and gone[1].endswith(": ./launch")


@pytest.mark.parametrize(
    ("preempted", "requeued"),
    [("None", False), ("2026-11-30T05:00:00", False), ("2026-11-30T06:30:00", True)],
)
def test_two_early_preemptions_are_not_a_lack_of_progress(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, preempted: str, requeued: bool
) -> None:
    """With a GraceTime SLURM signals the steps alone, and the job is still running. The time may
    be that of an earlier start."""
    times = f"StartTime=2026-11-30T06:00:00 PreemptEligibleTime=N/A PreemptTime={preempted}"
    answer = f"JobState=RUNNING Requeue=1 {times}"
    assert end(run, monkeypatch, [0, 0], 75, answer) == (75, requeued)


def end(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, steps: list[int], status: int, answer: str
) -> tuple[int, bool]:
    """(exit code of a job after starts at these steps, was it requeued)"""
    frozen, calls = submission.FrozenJob(run.path / "code"), list[str]()
    facts = {"typed": [], "name": "one", "starts": [start(2) | {"step": step} for step in steps]}
    frozen.record.write_text(json.dumps(facts))
    monkeypatch.setattr(controller, "ask", lambda *_: controller.Answer(0, answer, ""))
    monkeypatch.setattr(job, "requeue", lambda *_: calls.append("requeue") or "")
    return job.end(frozen, status, False, {"SLURM_JOB_ID": "7"}), bool(calls)


@pytest.mark.parametrize(
    ("states", "warned"),
    [
        ({"7": "RUNNING"}, "job 7 of demo is RUNNING"),
        ({"7": "TIMEOUT", "9": "PENDING"}, "job 9 of demo is PENDING"),
        ({"7": job.FORGOTTEN, "9": job.UNKNOWN}, ""),
        ({}, ""),
    ],
)
def test_a_second_job_for_a_run_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    states: dict[str, str],
    warned: str,
) -> None:
    """Job 7 has begun, job 9 may wait in the queue."""
    run = RunDir(tmp_path / "demo")
    run.create()
    write_json(run.path / "code.json", {"job": "7" if "7" in states else None, "cluster": "c"})
    if "9" in states:
        run.event("submitted", job="9", cluster="")
    monkeypatch.setattr(job, "state_elsewhere", lambda number, cluster: states[number])
    submit._warn_of_job(run)
    said = capsys.readouterr().err
    assert (warned in said) if warned else not said
    assert not warned or "--dependency=afterany:" in said
