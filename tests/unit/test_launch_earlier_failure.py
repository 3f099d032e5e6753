"""A rank of a script has raised an exception, something keeps its process, and then comes a request to
stop: the ranks save as after any request, and the run has failed."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_launch_attempt import PLAN
from tests.unit.verdicts import report_error
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json
from training.launcher import failure_report, first_failure, local_ranks, stop_signals, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks

TERM = int(signal.SIGTERM)
RANK = """
import os, signal, sys, time
from pathlib import Path
rank, run = int(os.environ["RANK"]), Path(sys.argv[1])
"""
SAVES = f"""
def save(*_):
    time.sleep(1.5)
    (run / f"saved{{rank}}").touch(); os._exit(0)
signal.signal({TERM}, save)
"""
BEGINS = """
(run / f"ready{rank}").touch(); time.sleep(600)
"""
TIMEOUT = "Timed out waiting 6000ms for recv operation to complete"  # of gloo
SCRIPT = {"path": "main.py", "args": [], "python": "python3"}


class Line:
    """To machines that have ended."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.wires: dict[int, Any] = {}
        self.plan = PLAN
        self.place = type("Place", (), {"leads": True, "leader": 0})

    def send_all(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def watch(self, still_s: float) -> list[Any]:
        return []

    def overdue(self) -> None:
        return None


Made = Callable[..., Attempt]


@pytest.fixture
def made(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Two ranks; once both are ready, the attempt gets each request: a signal, or a message."""
    monkeypatch.setattr(timeouts, "PEER_GRACE_S", 0.3)
    monkeypatch.setattr(timeouts, "STALL_S", 0.3)
    monkeypatch.setattr(first_failure, "SIGNALS_S", 30.0)  # the ranks may start slowly

    def make(code: str, requests: list[Any], line: Any = None) -> Attempt:
        command = [sys.executable, "-c", RANK + textwrap.dedent(code) + BEGINS, str(run.path)]
        monkeypatch.setattr(local_ranks, "command", lambda *_: command)
        plan = PLAN | {"ranks": 2, "script": SCRIPT}
        team = LocalRanks(range(2), 2, "127.0.0.1", 1)
        tried = Attempt(run, plan, team, uuid.uuid4().hex, line)
        left = list(requests)

        def ask() -> None:
            if left and len(list(run.path.glob("ready*"))) == 2:
                request = left.pop(0)
                if isinstance(request, dict):
                    tried.stop.from_peer(request, "node 1")
                else:
                    os.kill(os.getpid(), request)

        tried.each_pass = ask
        return tried

    return make


def raised(run: RunDir, kind: str = "ValueError", age_s: float = 60, said: str = "75") -> str:
    """Code with which rank 1 raises. Written by the rank: the launcher removes older reports."""
    report_error(run, 1, kind, said, time.time() - age_s)
    written = json.dumps(read_json(run.rank_error(1)))
    return f"if rank: Path({str(run.rank_error(1))!r}).write_text({written!r})\n"


def saved(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.glob("saved*"))


@pytest.mark.parametrize(
    ("kind", "age_s", "failed"),
    [
        ("ValueError", 60, True),
        ("ValueError", 0, False),  # the signal may have reached the rank first
        ("KeyboardInterrupt", 60, False),
        ("SystemExit", 60, False),
    ],
)
def test_ranks_save_after_a_request_that_follows_an_exception(
    run: RunDir, handlers: None, made: Made, kind: str, age_s: int, failed: bool
) -> None:
    outcome = made(SAVES + raised(run, kind, age_s), [TERM]).go()
    assert (saved(run), sorted(outcome.ended)) == (["saved0", "saved1"], [(0, 0), (1, 0)])
    assert (outcome.guilty, outcome.late_stop) == (((1, 1), TERM) if failed else (None, None))
    code = Exit.TRAINING if failed else Exit.PREEMPTED
    assert (failure_report.exit_code(outcome), outcome.asked) == (code, Exit.PREEMPTED)
    assert not (outcome.killed or outcome.forced)


def test_the_exception_counts_also_where_the_ranks_do_not_stop(
    run: RunDir, handlers: None, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "PAIR_S", 0.0)  # two requests
    ignores = f"signal.signal({TERM}, signal.SIG_IGN)\n"
    outcome = made(ignores + raised(run), [TERM, TERM]).go()
    assert sorted(outcome.ended) == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)]
    assert (outcome.guilty, outcome.killed, failure_report.exit_code(outcome)) == (
        (1, 1),
        False,
        Exit.TRAINING,
    )
    assert outcome.forced


def test_the_exception_counts_also_where_a_rank_cannot_be_killed(
    run: RunDir, handlers: None, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "UNKILLABLE_S", -1.0)  # not even a look after SIGKILL
    monkeypatch.setattr(stop_signals, "PAIR_S", 0.0)
    ignores = f"signal.signal({TERM}, signal.SIG_IGN)\n"
    outcome = made(ignores + raised(run), [TERM, TERM, TERM]).go()
    assert outcome.blocked
    assert (outcome.guilty, outcome.killed, failure_report.exit_code(outcome)) == (
        (1, 1),
        False,
        Exit.TRAINING,
    )


def test_the_other_machines_know_it_but_are_not_ended(
    run: RunDir, handlers: None, made: Made
) -> None:
    line = Line()
    outcome = made(SAVES + raised(run), [TERM], line).go()
    assert (saved(run), outcome.guilty, outcome.elsewhere) == (["saved0", "saved1"], (1, 1), False)
    assert line.sent == [
        {"asked": TERM, "times": 1, "left": None},
        {"asked": TERM, "times": 1, "raised": True},
        {"ended": Exit.PREEMPTED},
    ]


def test_ranks_save_where_a_rank_of_another_machine_had_raised(
    run: RunDir, handlers: None, made: Made
) -> None:
    line, asked = Line(), {"asked": TERM, "times": 1, "left": None}
    outcome = made(SAVES, [asked, asked | {"raised": True}], line).go()
    assert (saved(run), outcome.guilty, outcome.elsewhere) == (
        ["saved0", "saved1"],
        (None, 0),
        True,
    )
    assert (failure_report.exit_code(outcome), outcome.late_stop) == (Exit.TRAINING, TERM)
    assert [message for message in line.sent if "failed" in message] == []
    assert {"asked": TERM, "times": 1, "raised": True} in line.sent, "for a third machine"
