"""Ranks of Duet's training that are killed after its work is complete."""

from __future__ import annotations

import signal
import sys
import textwrap
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_launch_attempt import PLAN, RANK
from tests.unit.test_launch_late_exits import ERROR as RAISED
from training.core import checkpoint_folder
from training.core.errors import Exit
from training.core.rundir import RunDir, write_json
from training.launcher import failure_report, local_ranks, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome

# `beat` publishes the phase of this rank, `summarise` writes the summary.
RANKS = f"""{RANK}
from training.core.rundir import write_json
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
beat = Heartbeat(folder / "heartbeat" / f"rank{{rank}}.bin", rank).beat
def summarise(code, status, launch={PLAN["launch"]!r}):
    write_json(folder / "summary.json", {{"exit_code": code, "status": status, "launch": launch}})
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""
Run = Callable[..., Outcome]


@pytest.fixture
def result(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The outcome of two ranks with this code; the file `go` appears some checks after an exit."""
    for name in ("PEER_GRACE_S", "SHORT_GRACE_S"):
        monkeypatch.setattr(timeouts, name, 0.0)

    def make(code: str, **plan: Any) -> Outcome:
        command = [sys.executable, "-c", RANKS + textwrap.dedent(code), str(run.path)]
        monkeypatch.setattr(local_ranks, "command", lambda *_: command)
        team = LocalRanks(range(2), 2, "127.0.0.1", 1)
        tried, passes = Attempt(run, PLAN | {"ranks": 2} | plan, team, uuid.uuid4().hex), []

        def count() -> None:
            passes.append(bool(tried.outcome.ended))
            if sum(passes) > 3:
                (run.path / "go").touch()

        tried.each_pass = count
        return tried.go()

    return make


@pytest.mark.parametrize("code", [Exit.DONE, Exit.PREEMPTED])
def test_rank_0_still_writes_its_results(
    run: RunDir, result: Run, capfd: pytest.CaptureFixture[str], code: Exit
) -> None:
    """A summary of an earlier start does not count."""
    write_json(run.summary, {"exit_code": 143, "status": "stopped", "launch": "earlier"})
    outcome = result(
        f"""
        if rank:
            beat("finished")
            killed()
        beat("sample")
        wait("go")
        summarise({int(code)}, "{"stopped" if code else "done"}")
        beat("finished")
        sys.exit({int(code)})
        """
    )
    assert outcome.ended == [(1, -signal.SIGKILL), (0, int(code))] and outcome.guilty is None
    assert failure_report.exit_code(outcome) == code
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("in_time", [True, False])
def test_a_checkpoint_that_is_being_written_is_completed_after_a_failure(
    run: RunDir, result: Run, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr(checkpoint_folder, "LEAVE_S", 60.0 if in_time else 0.2)
    outcome = result(
        f"""
        if rank:
            wait("saves")
            killed()
        work = folder / "checkpoints" / ".writing-step_00000007-a"
        work.mkdir()
        (folder / "saves").touch()
        wait({"go" if in_time else "never"!r})
        work.rename(folder / "checkpoints" / "step_00000007")
        time.sleep(3600)
        """
    )
    assert outcome.guilty == (1, -signal.SIGKILL)
    assert dict(outcome.ended)[0] == -signal.SIGKILL
    assert (run.checkpoints / "step_00000007").exists() == in_time


AFTER_THE_SUMMARY = """
    if rank:
        wait("summary.json")
        beat("barrier: end of training")
        killed()
    summarise({code}, {status!r}, {launch!r})
    beat("closing trackers")
    time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("status", "launch", "complete"),
    [
        ("done", PLAN["launch"], True),
        ("stopped", PLAN["launch"], False),
        ("done", "earlier", False),
    ],
)
def test_a_complete_training_has_not_failed(
    result: Run, status: str, launch: str, complete: bool
) -> None:
    outcome = result(AFTER_THE_SUMMARY.format(code=0, status=status, launch=launch))
    assert {rank for rank, _ in outcome.ended} == {0, 1}
    assert outcome.guilty == (None if complete else (1, -signal.SIGKILL))
    assert failure_report.exit_code(outcome) == (Exit.DONE if complete else Exit.TRAINING)


def test_an_exception_after_the_summary_is_a_failure(result: Run) -> None:
    outcome = result(
        """
        if rank:
            beat("finished")
            sys.exit()
        summarise(0, "done")
        beat("closing trackers")
        raise ValueError
        """
    )
    assert outcome.guilty == (0, 1) and failure_report.exit_code(outcome) == Exit.TRAINING


@pytest.mark.parametrize("raised", [False, True])
def test_torchrun_reports_only_that_something_failed(run: RunDir, raised: bool) -> None:
    """An exception of a rank is in its own file."""
    tried = Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex)
    write_json(run.summary, {"exit_code": 0, "status": "done", "launch": PLAN["launch"]})
    if raised:
        write_json(run.rank_error(0), RAISED)
    tried.outcome.guilty = tried.outcome.here = (None, 1)
    tried.failure.forget_if_complete()
    assert tried.outcome.guilty == ((None, 1) if raised else None)
    assert failure_report.exit_code(tried.outcome) == (Exit.TRAINING if raised else Exit.DONE)
