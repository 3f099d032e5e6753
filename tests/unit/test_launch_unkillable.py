"""A rank that even SIGKILL does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid

import pytest

from tests.unit.test_launch_attempt import PLAN
from training.core.rundir import RunDir
from training.launcher import timeouts
from training.launcher.attempt import Attempt
from training.launcher.child import Child
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.watchdog.probes import procfs


class Unkillable:
    """Stand-in for a process blocked in the kernel, which cannot be made on demand."""

    pid = os.getpid()

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("rank", timeout)


class FakeChild(Child):
    def signal_group(self, number: signal.Signals) -> None:
        assert number == signal.SIGKILL


def test_a_rank_that_sigkill_does_not_end_is_left_behind(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex)
    child = FakeChild(0, Unkillable(), -1, -1)  # type: ignore[arg-type]
    monkeypatch.setattr(tried.children, "start", lambda: tried.children.alive.update({-1: child}))
    monkeypatch.setattr(timeouts, "UNKILLABLE_S", 0.0)
    monkeypatch.setattr(
        procfs,
        "read_process",
        lambda pid: type("Process", (), {"waits_in": "nfs_wait_bit_killable"}),
    )
    tried.each_pass = tried.children.kill
    outcome = tried.go()
    text = (
        f"rank 0 (pid {os.getpid()}) cannot be killed: blocked in the kernel "
        f"(nfs_wait_bit_killable)"
    )
    assert outcome.blocked == text and text in capfd.readouterr().err


def test_no_restart_while_a_rank_cannot_be_killed(run: RunDir) -> None:
    plan = PLAN | {"retries": {"value": 2, "reason": ""}}
    facts = {
        "cause": "unknown",
        "kind": "died",
        "rank": 0,
        "status": -9,
        "step": 3,
        "phase": "",
        "summary": "killed",
        "time": 0.0,
    }
    outcome = Outcome(
        guilty=(0, -9), blocked="rank 1 (pid 7) cannot be killed: blocked in the kernel"
    )
    tried = Recovery(run, plan)
    assert tried.choose(facts, outcome) is None
    assert tried.given_up.startswith("not restarted: rank 1 (pid 7) cannot be killed")
