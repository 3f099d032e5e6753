"""Ranks that stop to start again with others, and stop requests between two attempts."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from typing import Any

import pytest

from tests.unit.test_launch_attempt import PLAN, RANK
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json
from training.launcher import failure_report, local_ranks, stop_signals, supervisor, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.stop_signals import StopSignals

SCRIPT = {"path": "main.py", "args": [], "python": "python3"}


def attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str, **plan: object) -> Attempt:
    """Of one rank with this code."""
    command = [sys.executable, "-c", RANK + code, str(run.path)]
    monkeypatch.setattr(local_ranks, "command", lambda *_: command)
    return Attempt(run, PLAN | plan, LocalRanks(range(1), 1), uuid.uuid4().hex)


def change_when_ready(tried: Attempt, run: RunDir) -> None:
    """Ask the rank once to end, so that it starts again with others."""
    if (run.path / "ready").exists() and not tried.outcome.resized:
        tried.stop.for_other_ranks()


@pytest.mark.parametrize("stop", [False, True])
def test_ranks_that_are_to_start_again_with_others_are_not_hurried(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """`stop`: SIGTERM arrives while they save their checkpoint."""
    monkeypatch.setattr(timeouts, "STALL_S", 0.1)
    monkeypatch.setattr(timeouts, "silent", lambda *_: not stop)
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1], 'asked').touch())\n"
        "beat('forward'); Path(sys.argv[1], 'ready').touch()\n"
        "while not Path(sys.argv[1], 'go').exists(): time.sleep(0.01)\n"
        "sys.exit(75)"
    )
    tried = attempt(run, monkeypatch, code)
    passes = []  # after the request, when

    def ask() -> None:
        change_when_ready(tried, run)
        if (run.path / "asked").exists():
            if stop and not passes:
                os.kill(os.getpid(), signal.SIGTERM)
            passes.append(time.monotonic())
        if len(passes) > 3 and passes[-1] - passes[0] > 3 * timeouts.STALL_S:
            (run.path / "go").touch()

    tried.each_pass = ask
    outcome = tried.go()
    assert outcome.resized and not outcome.killed and outcome.ended == [(0, 75)]
    assert failure_report.exit_code(outcome) == Exit.PREEMPTED


def test_a_signal_while_the_ranks_of_a_script_change(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the script, which has no more time than before."""
    monkeypatch.setattr(timeouts, "RESIZE_S", 10.0)
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1], 'asked').touch())\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(3))\n"
        "Path(sys.argv[1], 'ready').touch()\n"
        "while True: time.sleep(0.01)"
    )
    tried = attempt(run, monkeypatch, code, script=SCRIPT)
    asked_at: list[float | None] = []

    def ask() -> None:
        change_when_ready(tried, run)
        if (run.path / "asked").exists() and not asked_at:
            asked_at.append(tried.stop.asked_at)
            os.kill(os.getpid(), signal.SIGINT)

    tried.each_pass = ask
    assert tried.go().ended == [(0, 3)] and tried.outcome.asked == Exit.INTERRUPTED
    assert asked_at == [tried.stop.asked_at]


@pytest.mark.parametrize(("limit_s", "status"), [(60.0, 0), (0.1, -signal.SIGKILL)])
def test_a_script_whose_ranks_change_may_save_as_under_torchrun(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, limit_s: float, status: int
) -> None:
    monkeypatch.setattr(timeouts, "STALL_S", 0.1)
    monkeypatch.setattr(timeouts, "RESIZE_S", limit_s)
    code = (
        "def save(*_):\n    Path(sys.argv[1], 'asked').touch()\n"
        "    while not Path(sys.argv[1], 'go').exists(): time.sleep(0.01)\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save); Path(sys.argv[1], 'ready').touch()\n"
        "time.sleep(600)"
    )
    tried = attempt(run, monkeypatch, code, script=SCRIPT)
    saving: list[float] = []

    def ask() -> None:
        change_when_ready(tried, run)
        if (run.path / "asked").exists():
            saving.append(time.monotonic())
        if saving and status == 0 and saving[-1] - saving[0] > 5 * timeouts.STALL_S:
            (run.path / "go").touch()

    tried.each_pass = ask
    assert tried.go().ended == [(0, status)] and not tried.outcome.killed


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")]
)
def test_a_stop_signal_between_two_attempts(
    run: RunDir,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    code: int,
    name: str,
) -> None:
    class Killed:
        """The first attempt, whose rank dies; the signal arrives after its end."""

        def __init__(self, *_: Any, signals: StopSignals) -> None: ...

        def go(self) -> Outcome:
            return Outcome(guilty=(0, -9), here=(0, -9))

    monkeypatch.setattr(supervisor, "Attempt", Killed)
    monkeypatch.setattr(
        supervisor.prepared_cache, "changed", lambda run: os.kill(os.getpid(), number)
    )
    plan = PLAN | {"retries": {"value": 2, "reason": ""}, "place": {"node_rank": 0, "nnodes": 1}}
    plan |= {
        "command": {"script": "launch_train.sh"},
        "origins": dict.fromkeys(("out_dir", "log_dir"), "default"),
    }
    assert supervisor._attempts(run, plan, PostRun(run, plan), set(), "") == code
    logged = capfd.readouterr().err
    assert "restarting from the beginning (1 of 2)" in logged
    assert f"{name}: stopped before the restart; step 0 is saved (exit {code})" in logged
    assert (read_json(run.failure) or {})["kind"] == "asked"


def test_a_signal_to_every_machine_counts_once(
    run: RunDir, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scancel: it may arrive after another machine has passed it on, and twice."""
    signals = StopSignals()
    tried = Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex, signals=signals)
    killed = []
    with signals:
        tried.stop.from_peer({"asked": int(signal.SIGTERM), "times": 1}, "node 1")
        for pair_s in (stop_signals.PAIR_S, stop_signals.PAIR_S, 0.0):
            monkeypatch.setattr(stop_signals, "PAIR_S", pair_s)
            os.kill(os.getpid(), signal.SIGTERM)
            tried.stop.on_signal(signals.fd)
            killed.append(tried.outcome.killed)
    assert killed == [False, False, True], "a later one is a second request"
