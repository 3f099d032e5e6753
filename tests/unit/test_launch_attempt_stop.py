"""Stop requests during an attempt: what the ranks may still do, how long they get, and that nothing
is restarted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_launch_attempt import PLAN, RANK
from training.core import manifest
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json
from training.host import process
from training.launcher import (
    child_processes,
    failure_report,
    local_ranks,
    spawn,
    stop_report,
    timeouts,
)
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.watchdog.hang_report import UNEVEN

SCRIPT = {"path": "main.py", "args": [], "python": "python3"}


@pytest.fixture
def pair(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Two ranks whose code has `rank`, `beat`, and `sleep()` until killed."""

    def go(code: str, *, script: bool, stop: int = 0) -> Outcome:
        begin = RANK.replace('"rank0.bin", 0', 'f"rank{rank}.bin", rank').replace(
            "beat =", "rank = int(os.environ['RANK'])\nbeat ="
        )
        begin += "sleep = lambda: time.sleep(600)\n"
        command = [sys.executable, "-c", begin + textwrap.dedent(code), str(run.path)]
        monkeypatch.setattr(local_ranks, "command", lambda *_: command)
        plan = PLAN | {"ranks": 2, "script": SCRIPT if script else None}
        tried = Attempt(run, plan, LocalRanks(range(2), 2, "127.0.0.1", 1), uuid.uuid4().hex)

        def ask() -> None:
            if len(list(run.path.glob("ready*"))) == 2:
                tried.each_pass = lambda: None
                os.kill(os.getpid(), stop)

        tried.each_pass = ask if stop else tried.each_pass
        return tried.go()

    return go


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGUSR2])
def test_ranks_get_a_signal_without_a_search_below_them(
    handlers: None,
    pair: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stop: int,
) -> None:
    def full(*_: object, alone: bool) -> None:
        raise OSError(23, "Too many open files in system")

    monkeypatch.setattr(child_processes, "targets", full)
    code = f"""
        signal.signal({int(stop)}, lambda *_: os._exit(0))
        Path(sys.argv[1], f"ready{{rank}}").touch(); sleep()
        """
    assert sorted(pair(code, script=True, stop=stop).ended) == [(0, 0), (1, 0)]
    assert capfd.readouterr().err.count("Too many open files in system") == 1


def test_sigusr2_does_not_end_a_rank_without_a_handler(
    handlers: None, pair: Callable[..., Outcome]
) -> None:
    """As one of Duet's before it can write its stacks."""
    code = f"""
        asked = Path(sys.argv[1], "asked")
        rank and signal.signal({int(signal.SIGUSR2)}, lambda *_: asked.touch())
        Path(sys.argv[1], f"ready{{rank}}").touch()
        while not asked.exists(): time.sleep(0.01)
        """
    assert sorted(pair(code, script=False, stop=signal.SIGUSR2).ended) == [(0, 0), (1, 0)]


def test_sigusr2_does_not_end_a_launcher_without_a_handler(run: RunDir, token: str) -> None:
    """As torchrun."""
    child = spawn.start_watched(["sleep", "600"], token)
    children = Attempt(run, PLAN, LocalRanks(range(1), 1), token).children
    children.alive = {child.pidfd: child}
    children.pass_on(signal.SIGUSR2)
    child.signal(signal.SIGTERM)
    assert child.popen.wait() == -signal.SIGTERM
    for fd in (child.pidfd, *child.outputs.values()):
        os.close(fd)


@pytest.mark.parametrize(
    ("end", "stop", "code", "statuses"),
    [
        (
            "lambda *_: os._exit(0)",
            signal.SIGTERM,
            Exit.PREEMPTED,
            ": rank 0, 1 ended with status 0",
        ),
        (
            "lambda *_: os._exit(rank)",
            signal.SIGTERM,
            Exit.PREEMPTED,
            ": rank 0 ended with status 0; rank 1 exited with status 1",
        ),
        ("signal.SIG_DFL", signal.SIGUSR1, Exit.PREEMPTED, ": rank 0, 1 killed by SIGUSR1"),
        (
            "lambda *_: os._exit(0)",
            signal.SIGINT,
            Exit.INTERRUPTED,
            ": rank 0, 1 ended with status 0",
        ),
    ],
)
def test_a_script_after_a_stop_request_has_not_failed(
    run: RunDir,
    handlers: None,
    pair: Callable[..., Outcome],
    end: str,
    stop: int,
    code: Exit,
    statuses: str,
) -> None:
    """Nor has it finished: the signal determines the exit code, the statuses of the ranks are
    shown."""
    body = (
        f"signal.signal({int(stop)}, {end})\nPath(sys.argv[1], f'ready{{rank}}').touch()\nsleep()"
    )
    outcome = pair(body, script=True, stop=stop)
    assert (outcome.guilty, outcome.killed, failure_report.exit_code(outcome)) == (
        None,
        False,
        code,
    )
    assert outcome.late_stop is None
    assert stop_report.statuses(outcome) == statuses


@pytest.mark.parametrize(
    ("usr1", "status"),
    [("signal.SIG_DFL", 0), ("lambda *_: os._exit(1)", 1)],
)
def test_a_rank_of_a_script_without_a_handler_for_usr1_gets_term(
    handlers: None, pair: Callable[..., Outcome], usr1: str, status: int
) -> None:
    """As of Lightning, which saves at USR1 only in a job of SLURM's own."""
    body = f"""
    signal.signal({int(signal.SIGUSR1)}, {usr1})
    signal.signal({int(signal.SIGTERM)}, lambda *_: os._exit(0))
    Path(sys.argv[1], f"ready{{rank}}").touch(); sleep()
    """
    outcome = pair(body, script=True, stop=signal.SIGUSR1)
    assert (sorted(outcome.ended), outcome.asked) == ([(0, status), (1, status)], Exit.PREEMPTED)


def test_a_stop_request_after_a_failure_does_not_hide_it(
    run: RunDir, handlers: None, pair: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the lost rank in code that no signal interrupts."""
    monkeypatch.setattr(timeouts, "PEER_GRACE_S", 2.0)
    body = f"""
    signal.signal({int(signal.SIGINT)}, signal.SIG_IGN)
    if rank:
        os._exit(1)
    events = Path(sys.argv[1], "events.jsonl")
    while not events.exists() or "verdict" not in events.read_text():
        time.sleep(0.02)
    for name in ("ready0", "ready1"):
        Path(sys.argv[1], name).touch()
    sleep()
    """
    outcome = pair(body, script=True, stop=signal.SIGINT)
    assert (outcome.guilty, outcome.killed) == ((1, 1), False)
    assert (outcome.asked, outcome.late_stop) == (Exit.INTERRUPTED, signal.SIGINT)
    assert failure_report.exit_code(outcome) == Exit.TRAINING


def test_a_stop_status_of_one_rank_of_a_script_alone_is_a_failure(
    pair: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "PEER_GRACE_S", 0.5)
    alone = pair("sys.exit(75) if rank else sleep()", script=True)
    assert alone.guilty == (1, 75) and failure_report.exit_code(alone) == Exit.TRAINING
    assert alone.death and "status 75" in alone.death.how
    monkeypatch.undo()


def test_a_stop_status_of_all_ranks_of_a_script_is_passed_on(
    pair: Callable[..., Outcome],
) -> None:
    both = pair("sys.exit(75)", script=True)
    assert both.guilty is None and failure_report.exit_code(both) == Exit.PREEMPTED


@pytest.mark.parametrize(("status", "number"), [(75, signal.SIGTERM), (130, signal.SIGINT)])
def test_a_stop_signal_to_one_rank_of_a_training_stops_all(
    run: RunDir, handlers: None, pair: Callable[..., Outcome], status: int, number: int
) -> None:
    """At once, by the same signal; what they cannot complete without it is not a failure."""
    outcome = pair(
        f"""
        beat("forward")
        signal.signal({int(number)}, lambda *_: os._exit(1))
        Path(sys.argv[1], f"ready{{rank}}").touch()
        while rank and not Path(sys.argv[1], "ready0").exists(): time.sleep(0.01)
        sys.exit({status}) if rank else sleep()
        """,
        script=False,
    )
    assert (outcome.left, outcome.guilty, outcome.killed) == (1, None, True)
    assert sorted(outcome.ended) == [(0, 1), (1, status)], "it was asked to stop, not killed"
    assert failure_report.exit_code(outcome) == status
    record = failure_report.failure(outcome, run, PLAN)
    assert record["kind"] == "asked" and record["summary"].startswith("rank 1 ")


@pytest.mark.parametrize(("step", "code"), [(0, Exit.PREEMPTED), (1, Exit.TRAINING)])
def test_a_training_killed_after_a_stop_request_has_lost_only_the_steps_it_had_begun(
    run: RunDir,
    handlers: None,
    pair: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    code: Exit,
) -> None:
    """A node that is preempted while its ranks build the model can be queued again."""
    monkeypatch.setattr(timeouts, "STALL_S", 0.5)
    outcome = pair(
        f"""
        beat.__self__.step = {step}
        beat("building the model")
        signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN)
        Path(sys.argv[1], f"ready{{rank}}").touch()
        sleep()
        """,
        script=False,
        stop=signal.SIGTERM,
    )
    assert (outcome.killed, outcome.idle) == (True, step == 0)
    assert failure_report.exit_code(outcome) == code
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["kind"], record["cause"]) == ("asked", "preempted")


@pytest.mark.parametrize(
    ("stop", "code", "cause"),
    [
        (signal.SIGINT, Exit.INTERRUPTED, "interrupted"),
        (signal.SIGTERM, Exit.TRAINING, "preempted"),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_a_stop_request_to_a_stuck_training_names_the_stuck_rank(
    run: RunDir,
    handlers: None,
    pair: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
    code: Exit,
    cause: str,
    saved: bool,
) -> None:
    """It is the usual reason for the request."""
    monkeypatch.setattr(timeouts, "STALL_S", 0.5)
    monkeypatch.setattr(timeouts, "NOTICE_S", 0.5)
    monkeypatch.setattr(manifest, "newest_step", lambda folder: 5 if saved else 0)
    outcome = pair(
        f"""
        beat.__self__._first_step = 1
        beat.__self__.step = 9
        beat("forward")
        rank or beat("backward")
        signal.signal({stop}, signal.SIG_IGN)
        Path(sys.argv[1], f"ready{{rank}}").touch()
        sleep()
        """,
        script=False,
        stop=stop,
    )
    assert (outcome.killed, failure_report.exit_code(outcome)) == (True, code)
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["kind"], record["cause"], record["rank"]) == ("asked", cause, 1)
    assert record["phase"] == "step 9: forward" == record["phases"]["1"]
    assert record["waiting"].keys() == {"0"} and record["phases"].keys() == {"0", "1"}
    assert {path.name for path in Path(record["stacks"] or "").iterdir()} >= {
        "rank0.txt",
        "rank1.txt",
    }
    assert record["log"] == str(run.rank_log(1))
    assert ("last checkpoint" in record["summary"]) == saved
    assert read_json(next(run.hangs.glob("*/verdict.json")))["rank"] == 1


@pytest.mark.parametrize(
    "end", ["signal.default_int_handler", "lambda *_: os._exit(1)"], ids=["-2", "1"]
)
def test_a_rank_of_a_script_that_waits_for_one_that_was_interrupted_is_ended(
    run: RunDir,
    handlers: None,
    pair: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """Python raises no KeyboardInterrupt in C++, and NCCL does not notice the loss of a peer on the
    same machine."""
    monkeypatch.setitem(PLAN["config"], "hang_timeout", 1)
    outcome = pair(
        f"""
        signal.signal({int(signal.SIGINT)}, signal.SIG_IGN if rank else {end})
        Path(sys.argv[1], f"ready{{rank}}").touch()
        rank or sleep()
        called = "def all_reduce(): time.sleep(600)"
        exec(compile(called, "/x/torch/distributed/distributed_c10d.py", "exec"))
        all_reduce()
        """,
        script=True,
        stop=signal.SIGINT,
    )
    assert (outcome.killed, failure_report.exit_code(outcome)) == (True, Exit.INTERRUPTED)
    assert outcome.stalled and (outcome.stalled.kind, outcome.stalled.rank) == (UNEVEN, 0)
    assert outcome.stalled.waiting.keys() == {1} and outcome.stalled.folder


def test_processes_of_another_user_are_left_to_that_user(
    handlers: None,
    pair: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As of `./duet watch -- sudo …`: this process may not signal them."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    monkeypatch.setattr(subprocess.Popen, "send_signal", refuse)
    monkeypatch.setattr(process, "end_group", lambda pid: {})
    monkeypatch.setattr(timeouts, "STALL_S", 0.2)
    monkeypatch.setattr(timeouts, "UNKILLABLE_S", 0.2)
    body = "beat('forward'); Path(sys.argv[1], f'ready{rank}').touch(); sleep()"
    outcome = pair(body, script=False, stop=signal.SIGINT)
    assert (outcome.killed, failure_report.exit_code(outcome)) == (True, Exit.INTERRUPTED)
    pids = re.findall(r"rank \d \(pid (\d+)\)[^;]*: sudo kill \1", outcome.blocked)
    assert len(pids) == 2
    shown = capfd.readouterr().err  # one warning of each, and the last error
    assert [shown.count(f"sudo kill {pid}") for pid in pids] == [2, 2]
