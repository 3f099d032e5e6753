"""One start of real, small processes: what the supervisor does about those that fail, finish, stay,
or can not be ended."""

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
from typing import Any

import pytest

from training.core.errors import Exit
from training.core.heartbeat import Heartbeat, read_all
from training.core.project import ROOT
from training.core.rundir import RunDir, write_json
from training.launcher import child_processes, failure_report, local_ranks, spawn, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.watchdog import rank_exit

PLAN: dict[str, Any] = {
    "config": {"hang_timeout": 60, "num_workers": 0},
    "compile": {"value": False},
    "device": {"value": "cpu"},
    "launcher": {"value": "spawn"},
    "ranks": 1,
    "master_port": 0,
    "gpus": [],
    "retries": {"value": 0},
    "resume": None,
    "created": 0.0,
}
# What a rank does first: `beat(phase)` publishes.
RANK = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from training.core.heartbeat import Heartbeat
beat = Heartbeat(Path(sys.argv[1]) / "heartbeat" / "rank0.bin", 0).beat
"""
# as an abort of an earlier start has left it in the log
GLOO = "op.preamble.length <= op.nbytes 8 vs 4"
Start = Callable[[str], Attempt]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Start:
    def make(code: str) -> Attempt:
        monkeypatch.setattr(
            local_ranks,
            "command",
            lambda *_: [sys.executable, "-c", RANK + textwrap.dedent(code), str(run.path)],
        )
        return Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex)

    return make


# ── the words of an earlier start
# ────────────────────────────────────────────────────────────────────────────────────


def test_what_an_earlier_start_has_said_decides_nothing(run: RunDir, start: Start) -> None:
    run.rank_log(0).write_text(f"torch.OutOfMemoryError: CUDA out of memory.\n{GLOO}\n")
    tried = start(
        "beat('forward'); print('a word of this one', flush=True); os.kill(os.getpid(), "
        "signal.SIGABRT)"
    )
    outcome = tried.go()
    assert (
        outcome.guilty == (0, -signal.SIGABRT)
        and outcome.death
        and outcome.death.kind == rank_exit.DIED
    )
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["cause"], record["kind"], record["rank"]) == ("unknown", "died", 0)
    assert record["evidence"] == ["a word of this one"]


def test_what_this_start_says_decides(run: RunDir, start: Start) -> None:
    outcome = start(
        f"beat('forward'); print({GLOO!r}, flush=True); os.kill(os.getpid(), signal.SIGABRT)"
    ).go()
    assert outcome.death and outcome.death.kind == "desync"


def test_under_torchrun_a_rank_s_own_log_is_of_another_start(run: RunDir) -> None:
    run.rank_log(0).write_text("CUDA out of memory\n")
    log = run.ranks / "torchrun.log"
    log.write_text("earlier\nnow\n")
    record = failure_report.failure(
        Outcome(guilty=(0, 1), here=(0, 1), log_from={log: len("earlier\n")}), run, PLAN
    )
    assert (record["evidence"], record["log"]) == (["now"], str(log))


def test_files_of_an_earlier_start_and_of_a_larger_world_go(run: RunDir) -> None:
    for rank in range(4):
        Heartbeat(run.heartbeat(rank), rank).beat("forward")
        for name in ("error.json", "stacks", "ended", "sock", "log"):
            (run.ranks / f"rank{rank}.{name}").write_text("{}")
    spawn.remove_stale(run, LocalRanks(range(1), 2))
    assert [b.rank for b in read_all(run.heartbeats)] == [1], (
        "that of another machine of this start stays"
    )
    assert sorted(p.name for p in run.ranks.iterdir()) == [
        *(
            "rank0.log",
            "rank1.ended",
            "rank1.error.json",
            "rank1.log",
            "rank1.sock",
            "rank1.stacks",
            "rank2.log",
            "rank3.log",
        ),
    ]


# ── ranks that have finished and stay
# ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", [Exit.DONE, Exit.PREEMPTED])
def test_a_rank_that_has_finished_and_does_not_leave_is_ended(
    run: RunDir,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: Exit,
) -> None:
    """What it has trained is done; a stopped run is not taken for a finished one."""
    monkeypatch.setattr(timeouts, "CLOSING_S", 0.1)
    write_json(
        run.summary, {"status": "done" if code == Exit.DONE else "stopped", "exit_code": int(code)}
    )
    outcome = start("beat('finished'); time.sleep(3600)").go()
    assert outcome.ended == [(0, -signal.SIGKILL)] and outcome.guilty is None and not outcome.killed
    assert failure_report.exit_code(outcome) == code
    said = capfd.readouterr().err
    why = (
        r"and the process does not leave \(a thread that is no daemon, or what it does at "
        r"exit\): ended"
    )
    assert re.search(rf"rank 0: finished since \d s, {why}", said), said


# ── errors of what watches
# ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_error_beside_the_training_is_said_once_and_ends_nothing(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    tried, passes = start("beat('forward'); sys.stdin.read(); time.sleep(3600)"), []

    def fails() -> None:
        passes.append(1)
        if len(passes) == 3:
            next(iter(tried.children.alive.values())).popen.kill()
        raise OSError(23, "Too many open files in system")

    tried.each_pass = fails
    assert tried.go().guilty == (0, -signal.SIGKILL) and len(passes) >= 3
    text = (
        "noting how far the run is has failed, and nothing else with it: OSError: [Errno 23] "
        "Too many open files in system"
    )
    assert capfd.readouterr().err.count(text) == 1


def test_a_failure_that_can_not_be_explained_is_one_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_exit, "explain", lambda *_: 1 / 0)
    monkeypatch.setattr(child_processes.process, "sweep", lambda token: 1 / 0)
    outcome = start("beat('forward'); os.kill(os.getpid(), signal.SIGKILL)").go()
    assert outcome.guilty == (0, -signal.SIGKILL) and outcome.phases == {0: "step 0: forward"}
    said = capfd.readouterr().err
    assert (
        "telling of the failure has failed" in said
        and "looking for what ranks have left behind has failed" in said
    )


# ── the order of the ends
# ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ends_seen_at_once_the_earlier_one_counts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(
        local_ranks, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(3600)"]
    )
    tried = Attempt(run, PLAN, LocalRanks(range(2), 2, "127.0.0.1", 1), uuid.uuid4().hex)

    def kill_both() -> None:
        pids = {child.rank: child.popen.pid for child in tried.children.alive.values()}
        for rank in (first, 1 - first):
            os.kill(pids[rank], signal.SIGKILL)
            os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOWAIT)
        tried.each_pass = lambda: None

    tried.each_pass = kill_both
    outcome = tried.go()
    assert outcome.ended == [(first, -9), (1 - first, -9)] and outcome.guilty == (first, -9)


# ── what tidies up after a rank
# ────────────────────────────────────────────────────────────────────────────────────────

SHARED = """
from multiprocessing import get_context, shared_memory
kept = shared_memory.SharedMemory(create=True, size=5_000_000, name=sys.argv[1].replace("/", "_")[-40:])
get_context("forkserver").Process(target=time.sleep, args=(3600,), daemon=True).start()
beat("finished")
{}
"""


@pytest.mark.parametrize(
    ("ending", "ended"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("time.sleep(3600)", -signal.SIGKILL),  # killed by the supervisor, as after a hang
        ("kept.close()", 0),  # as a script that never unlinks what it shares
    ],
)
def test_shared_memory_of_a_rank_does_not_outlive_it(
    run: RunDir,
    start: Start,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    ended: int,
) -> None:
    monkeypatch.setattr(timeouts, "CLOSING_S", 0.1)
    outcome = start(SHARED.format(ending)).go()
    assert outcome.ended == [(0, ended)]
    assert not Path("/dev/shm", str(run.path).replace("/", "_")[-40:]).exists()
    said = capfd.readouterr().err
    assert "leaked shared_memory" in run.rank_log(0).read_text(), "it was there" + said
    assert "left behind" not in said


# ── ranks that can not be ended
# ──────────────────────────────────────────────────────────────────────────────────────


class Unkillable:
    """Stands for a process that waits in the kernel: that can not be made at will."""

    pid = os.getpid()

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("rank", timeout)


class FakeChild(spawn.Child):
    def signal_group(self, number: signal.Signals) -> None:
        assert number == signal.SIGKILL


def test_a_rank_that_not_even_sigkill_ends_is_left(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex)
    child = FakeChild(0, Unkillable(), -1, -1)  # type: ignore[arg-type]
    monkeypatch.setattr(tried.children, "start", lambda: tried.children.alive.update({-1: child}))
    monkeypatch.setattr(timeouts, "UNKILLABLE_S", 0.0)
    monkeypatch.setattr(
        timeouts.procfs,
        "read_process",
        lambda pid: type("Process", (), {"waits_in": "nfs_wait_bit_killable"}),
    )
    tried.each_pass = tried.children.kill
    outcome = tried.go()
    text = (
        f"rank 0 (pid {os.getpid()}) can not be ended: it is blocked in the kernel "
        f"(nfs_wait_bit_killable)"
    )
    assert outcome.blocked == text and text in capfd.readouterr().err


def test_where_a_rank_can_not_be_ended_nothing_is_started_again(run: RunDir) -> None:
    plan = PLAN | {"retries": {"value": 2, "reason": ""}, "place": {"node_rank": 0, "nnodes": 1}}
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
        guilty=(0, -9), blocked="rank 1 (pid 7) can not be ended: it is blocked in the kernel"
    )
    tried = Recovery(run, plan)
    assert tried.choose(facts, outcome) is None
    assert tried.given_up.startswith("not restarted: rank 1 (pid 7) can not be ended")
