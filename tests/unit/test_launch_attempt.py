"""One attempt with small real processes that fail, finish, do not exit, or cannot be killed."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.verdicts import report_error
from training.core.errors import RANK_FAILED, Exit, Problem, UserError
from training.core.heartbeat import Heartbeat, read_all
from training.core.project import ROOT
from training.core.rundir import RunDir, write_json
from training.diagnose import advice, signatures
from training.launcher import child_processes, failure_report, local_ranks, spawn, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.trainer import error_file
from training.watchdog import rank_exit
from training.watchdog.hang_report import HangFinding

PLAN: dict[str, Any] = {
    "config": {"hang_timeout": 60, "num_workers": 0},
    "compile": {"value": False},
    "device": {"value": "cpu"},
    "launcher": {"value": "spawn"},
    "ranks": 1,
    "local_ranks": 1,
    "place": {"node_rank": 0, "nnodes": 1},
    "master_port": 0,
    "gpus": [],
    "retries": {"value": 0},
    "resume": None,
    "created": 0.0,
    "launch": "0123456789abcdef",
}
# Start of every rank's program: `beat(phase)` publishes.
RANK = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from training.core.heartbeat import Heartbeat
from training.host import process
process.die_of_stop_signals()  # as train.py
beat = Heartbeat(Path(sys.argv[1]) / "heartbeat" / "rank0.bin", 0).beat
"""
# as logged by an abort in an earlier attempt
GLOO = "op.preamble.length <= op.nbytes 8 vs 4"
Start = Callable[[str], Attempt]


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


# ── output of an earlier attempt


def test_output_of_an_earlier_attempt_is_ignored(run: RunDir, start: Start) -> None:
    run.rank_log(0).write_text(f"torch.OutOfMemoryError: CUDA out of memory.\n{GLOO}\n")
    tried = start(
        "beat('forward'); print('output of this attempt', flush=True); os.kill(os.getpid(), "
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
    assert record["evidence"] == ["output of this attempt"]


def test_output_of_this_attempt_decides(run: RunDir, start: Start) -> None:
    outcome = start(
        f"beat('forward'); print({GLOO!r}, flush=True); os.kill(os.getpid(), signal.SIGABRT)"
    ).go()
    assert outcome.death and outcome.death.kind == "desync"


def test_the_phase_of_a_reported_error_is_where_the_rank_failed(run: RunDir, start: Start) -> None:
    """Rank 0 closes its trackers after the report."""
    report_error(run, 0, "OutOfMemoryError", "CUDA out of memory.", phase="evaluation")
    report = run.rank_error(0).read_text()  # the attempt removes it
    outcome = start(
        f"beat('evaluation'); Path({str(run.rank_error(0))!r}).write_text({report!r})\n"
        "beat('closing trackers'); sys.exit(1)"
    ).go()
    record = failure_report.failure(outcome, run, PLAN)
    assert (outcome.phases, record["phase"]) == ({0: "evaluation"}, "evaluation")


def test_under_torchrun_a_rank_s_own_log_is_from_another_attempt(run: RunDir) -> None:
    run.rank_log(0).write_text("CUDA out of memory\n")
    log = run.ranks / "torchrun.log"
    log.write_text("earlier\nnow\n")
    record = failure_report.failure(
        Outcome(guilty=(0, 1), here=(0, 1), log_from={log: len("earlier\n")}), run, PLAN
    )
    assert (record["evidence"], record["log"]) == (["now"], str(log))


def children(run: RunDir, team: LocalRanks, *, shared: bool) -> child_processes.ChildProcesses:
    return Attempt(run, PLAN | {"shared": shared}, team, "").children


def test_stale_files_of_an_earlier_attempt_and_a_larger_world_are_removed(run: RunDir) -> None:
    for rank in range(4):
        Heartbeat(run.heartbeat(rank), rank).beat("forward")
        for name in ("error.json", "stacks", "ended", "sock", "log"):
            (run.ranks / f"rank{rank}.{name}").write_text("{}")
    spawn.remove_stale(run, children(run, LocalRanks(range(1), 2), shared=True)._stale)
    assert [b.rank for b in read_all(run.heartbeats)] == [1], (
        "a rank of another machine of this attempt"
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
    # on a disk of its own they are from ranks that this machine had before
    spawn.remove_stale(run, children(run, LocalRanks(range(1), 2), shared=False)._stale)
    assert sorted(p.name for p in run.ranks.iterdir()) == [f"rank{r}.log" for r in range(4)]
    assert not read_all(run.heartbeats)


# ── finished ranks that do not exit


@pytest.mark.parametrize("code", [Exit.DONE, Exit.PREEMPTED])
def test_a_finished_rank_that_does_not_exit_is_killed(
    run: RunDir,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: Exit,
) -> None:
    """Its training is complete; a stopped run does not count as finished."""
    monkeypatch.setattr(timeouts, "CLOSING_S", 0.1)
    write_json(
        run.summary, {"status": "done" if code == Exit.DONE else "stopped", "exit_code": int(code)}
    )
    outcome = start("beat('finished'); time.sleep(3600)").go()
    assert outcome.ended == [(0, -signal.SIGKILL)] and outcome.guilty is None and not outcome.killed
    assert failure_report.exit_code(outcome) == code
    err = capfd.readouterr().err
    assert re.search(r"rank 0 finished \d s ago but has not exited .*; killed", err), err


def test_a_stop_signal_while_a_finished_rank_exits_is_not_a_failure(
    run: RunDir, start: Start
) -> None:
    """Its handler is gone by then."""
    write_json(run.summary, {"status": "stopped", "exit_code": int(Exit.PREEMPTED)})
    outcome = start(
        "beat('finished'); signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    ).go()
    assert outcome.ended == [(0, -signal.SIGTERM)] and outcome.guilty is None
    assert failure_report.exit_code(outcome) == Exit.PREEMPTED


# ── errors of the supervisor itself


def test_an_error_outside_the_training_is_logged_once_and_ends_nothing(
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
    assert capfd.readouterr().err.count("OSError: [Errno 23] Too many open files in system") == 1


def test_an_error_while_explaining_a_failure_does_not_hide_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_exit, "explain", lambda *_: 1 / 0)
    monkeypatch.setattr(child_processes.process, "sweep", lambda token: 1 / 0)
    outcome = start("beat('forward'); os.kill(os.getpid(), signal.SIGKILL)").go()
    assert outcome.guilty == (0, -signal.SIGKILL) and outcome.phases == {0: "step 0: forward"}
    err = capfd.readouterr().err
    assert err.count("ZeroDivisionError") == 2, "explain and sweep"


# ── order of the exits


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_exits_seen_at_once_the_earlier_one_counts(
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


# ── resource trackers of a rank

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
    limit_s = 0.1 if "sleep" in ending else math.inf  # of a rank that is to exit by itself
    monkeypatch.setattr(timeouts, "CLOSING_S", limit_s)
    outcome = start(SHARED.format(ending)).go()
    assert outcome.ended == [(0, ended)]
    assert not Path("/dev/shm", str(run.path).replace("/", "_")[-40:]).exists()
    err = capfd.readouterr().err
    assert "leaked shared_memory" in run.rank_log(0).read_text(), "it existed" + err
    assert "left behind" not in err


# ── ranks that cannot be killed


def test_a_process_left_behind_is_shown_without_secrets(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = {4711: "python t.py --db_password hunter2x"}
    monkeypatch.setattr(child_processes.process, "sweep", lambda token: left)
    children(run, LocalRanks(range(1), 1), shared=False).sweep()
    shown = capfd.readouterr().err
    assert "pid 4711" in shown and "--db_password …" in shown and "hunter2x" not in shown


@pytest.mark.parametrize("by_hang", [False, True])
def test_a_rank_that_has_reported_its_error_but_cannot_exit(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch, by_hang: bool
) -> None:
    """The driver of its GPU blocks its exit."""
    report_error(run, 0, "AcceleratorError", "CUDA error: unspecified launch failure")
    report = run.rank_error(0).read_text()  # the attempt removes it
    monkeypatch.setattr(timeouts, "RAISED_OWN_S", 3600.0 if by_hang else 0.1)
    monkeypatch.setattr(timeouts, "PEER_GRACE_S", 0.1)
    tried = start(
        f"beat('forward'); Path({str(run.rank_error(0))!r}).write_text({report!r})\ntime.sleep(600)"
    )
    found = HangFinding("hang", None, None, "all ranks wait for each other", {}, {}, 75.0)

    def hang() -> None:
        if by_hang and run.rank_error(0).exists() and tried.outcome.guilty is None:
            tried.failure.of_hang(found)

    tried.each_pass = hang
    outcome = tried.go()
    record = failure_report.failure(outcome, run, PLAN)
    assert (outcome.guilty, outcome.finding) == ((0, RANK_FAILED), None)
    assert (record["kind"], record["where"]) == ("error", "model.py:0")
    assert record["exit_code"] == Exit.TRAINING


def test_a_rank_that_has_rejected_its_input_but_cannot_exit(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    error_file.note(run, 0, UserError(Problem("data.differs", "planted", "the same data")))
    report = run.rank_error(0).read_text()  # the attempt removes it
    monkeypatch.setattr(timeouts, "RAISED_OWN_S", 0.1)
    outcome = start(
        f"beat('forward'); Path({str(run.rank_error(0))!r}).write_text({report!r})\ntime.sleep(600)"
    ).go()
    assert outcome.guilty == outcome.here == (0, Exit.CONFIG)
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["cause"], record["exit_code"]) == ("config_error", Exit.CONFIG)
    assert "planted" in record["rejected"][0]["text"] and "planted" not in capfd.readouterr().err


@pytest.mark.parametrize("why", ["may_end", "loops", None])
def test_a_higher_limit_is_the_remedy_only_where_the_rank_may_be_slow(
    run: RunDir, why: str | None
) -> None:
    may_end = why is not None
    found = HangFinding("hang", 1, "a.py:3", "is stuck", {}, {}, 9.0)
    found = replace(found, may_end=why == "may_end", loops=why == "loops")
    record = failure_report.failure(Outcome(guilty=(1, 0), finding=found), run, PLAN)
    assert record.get("may_end", False) == may_end
    hang = advice.filled(signatures.causes()["hang"].ours, {})
    slow = advice.of_kind("may_end", {"where": "a.py:3"})
    assert record["advice"][0] == (slow if may_end else hang)[0]


def test_a_stopped_rank_is_not_taken_for_a_hang_of_the_program(run: RunDir) -> None:
    found = HangFinding("stopped", 1, "a.py:3", "is stopped", {}, {}, 9.0)
    record = failure_report.failure(Outcome(finding=found), run, PLAN)
    assert record["advice"][0] == advice.of_kind("stopped", {})[0]


def test_process_1_of_a_container_leaves_no_orphans() -> None:
    space = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private PID namespace here (unshare --pid)")
    program = """
        import subprocess, time
        from training.launcher import orphans
        from training.watchdog.probes import procfs

        def ended():
            return {pid for pid in procfs.tree().get(1, []) if procfs.exit_status(pid) is not None}

        own = subprocess.Popen(["false"])
        subprocess.run(["sh", "-c", "sleep 0 & sleep 0 &"])
        while len(ended()) < 3:
            time.sleep(0.01)
        orphans.reap()
        assert ended() == {own.pid} and own.wait() == 1
    """
    command = [*space, sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
