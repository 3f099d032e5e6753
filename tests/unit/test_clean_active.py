"""`./duet clean` leaves runs that may be running or queued."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, old
from tests.unit.runs_to_clean import a_finished_and_a_live_run, cleaned, save, steps
from training.cli.cleaning import deletion, selection
from training.core import rundir, standing
from training.core.errors import Exit
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir
from training.core.standing import ELSEWHERE_S
from training.launcher.slurm import controller
from training.monitor.runs import facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_finished_and_a_live_run(tmp_path / "some runs")


@pytest.fixture(autouse=True)
def _unknown_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_away", {})
    monkeypatch.setattr(controller, "_local", [])


def test_a_run_that_starts_after_the_listing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = deletion.delete

    def starts(*args: object) -> object:
        run = RunDir(folder / "done")
        plan = rundir.read_json(run.plan) or {}
        run.summary.unlink()
        record = {"pid": os.getpid(), "started": plan["created"] + 1, "ranks": []}
        rundir.write_json(run.supervisor, record)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(deletion, "delete", starts)
    assert cleaned(folder, "--what=runs", "--state=finished", "--yes") == Exit.RESOURCES
    assert steps(folder) == [10, 20, 30]


def test_a_directory_without_a_plan_may_be_a_start(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name / "heartbeat").mkdir(parents=True)
        (folder / f"{name}-empty").mkdir()
    old = time.time() - 2 * standing.STARTED_WITHIN_S
    for path in folder.glob("b*"):
        os.utime(path, (old, old))
    assert cleaned(folder, "--what=runs", "--state=damaged,empty", "--yes") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["a", "a-empty", "done", "live"]


def test_a_run_without_a_supervisor_may_be_on_another_machine(folder: Path) -> None:
    """Ranks of torchrun on a shared disk: their PIDs mean nothing here."""
    there = Made(folder / "there", age_s=9000).steps(5).run
    Heartbeat(there.heartbeat(0), 0, pid=1 << 30).beat("forward")
    for step in (1, 2):
        save(there, step)
    here = Made(folder / "here", age_s=9000).steps(5).supervisor(1 << 30)
    facts = rundir.read_json(here.run.supervisor) or {}
    rundir.write_json(here.run.supervisor, {**facts, "host": socket.gethostname()})
    quiet_for(here, selection.HIDDEN_S)
    assert cleaned(folder, "--what=runs", "--state=died", "--yes") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["done", "live", "there"]
    assert cleaned(folder, "--keep=none", "--yes", "there") == Exit.DONE
    assert steps(folder, "there") == [1, 2]


def quiet_for(made: Made, seconds: float) -> None:
    """As if the run had written nothing for this time."""
    for file in made.run.path.rglob("*"):
        old(file, seconds)


def test_a_run_whose_processes_may_be_hidden_is_left_alone(folder: Path) -> None:
    """By a PID namespace, which early runs have not recorded, or by hidepid of /proc."""
    made = Made(folder / "hidden", age_s=9000).steps(5).supervisor(1 << 30)
    known = (rundir.read_json(made.run.supervisor) or {}) | {"host": socket.gethostname()}
    there = {"pid_namespace": "pid:[1]"}
    for more, seconds, gone in (
        ({}, 0.0, False),
        (there, selection.HIDDEN_S, False),
        (there, ELSEWHERE_S, True),
    ):
        rundir.write_json(made.run.supervisor, known | more)
        quiet_for(made, seconds)
        reason = selection.untouchable(facts.read(made.run.path))
        assert (not reason) == gone, (more, seconds)


@pytest.mark.parametrize(
    ("queued", "answer", "gone"),
    [
        ("submitted", "JobState=PENDING", False),
        ("requeue", "JobState=REQUEUE_HOLD", False),
        ("submitted", "JobState=CANCELLED", True),
        ("submitted", "", False),
        ("submitted a day ago", "", True),
        ("before the plan", "JobState=RUNNING", True),
        ("by SLURM", "JobState=PENDING", False),
        ("by SLURM", "", True),
        ("submitted to west", "JobState=PENDING", False),
        ("by SLURM on west", "JobState=PENDING", False),
        ("by SLURM on home", "JobState=PENDING", False),
    ],
)
def test_a_run_whose_job_waits_in_the_queue_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, queued: str, answer: str, gone: bool
) -> None:
    made = Made(folder / "waits", age_s=2 * ELSEWHERE_S)
    failure = {"kind": rundir.ASKED, "cause": "preempted", "time": made.at + 9}
    rundir.write_json(made.run.failure, failure)
    since = {"before the plan": -1.0, "submitted a day ago": ELSEWHERE_S - 9}
    at = made.at + since.get(queued, 2 * ELSEWHERE_S - 60)
    where, west = {"job": "4711"}, "west" in queued
    if queued.startswith("by SLURM"):
        on = {"cluster": queued.rpartition(" ")[2]} if " on " in queued else {}
        rundir.write_json(made.run.path / "code.json", where | on)
    else:
        on = {"cluster": "west"} if west else {}
        kind = "requeue" if queued == "requeue" else "submitted"
        rundir.append_json(made.run.events, {"event": kind, "time": at} | where | on)
    asked = "-M west show job -o 4711" if west else "show job -o 4711"
    scontrol(
        folder,
        monkeypatch,
        f'[ "$*" = "{asked}" ] && echo "{answer}"\n[ "$2" = config ] && echo "ClusterName = home"',
    )
    assert facts.read(made.run.path).state == "stopped"
    assert cleaned(folder, "--what=runs", "--yes", "waits") == Exit.DONE
    assert made.run.path.exists() != gone


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    program = folder.parent / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_slurmctld_that_is_away_is_asked_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may take a minute."""
    for name in ("one", "two"):
        made = Made(folder / name, age_s=2 * ELSEWHERE_S)
        failure = {"kind": rundir.ASKED, "cause": "preempted", "time": made.at + 9}
        rundir.write_json(made.run.failure, failure)
        event = {"event": "submitted", "time": time.time() - 60, "job": "4711"}
        rundir.append_json(made.run.events, event)
    calls = folder.parent / "calls"
    scontrol(folder, monkeypatch, f"echo >>'{calls}'; echo 'Unable to contact slurm' >&2; exit 1")
    assert cleaned(folder, "--what=runs", "--yes", "one", "two") == Exit.DONE
    assert (folder / "one").exists() and (folder / "two").exists()
    assert calls.read_text() == "\n"


def test_a_start_while_the_weights_are_read_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = RunDir(folder / "done"), selection.is_intact

    def starts(path: Path) -> bool:
        run.summary.unlink(missing_ok=True)
        created = (rundir.read_json(run.plan) or {})["created"]
        rundir.write_json(run.supervisor, {"pid": os.getpid(), "started": created + 1, "ranks": []})
        return real(path)

    monkeypatch.setattr(selection, "is_intact", starts)
    assert cleaned(folder, "--keep=last", "--yes") == Exit.RESOURCES
    assert steps(folder) == [10, 20, 30]
