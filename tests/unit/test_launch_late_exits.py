"""Ranks of a script that crash after its end, or do not exit after an exception or a stop request."""

from __future__ import annotations

import errno
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

from tests.unit.test_launch_attempt import PLAN, RANK
from training.core.errors import Exit
from training.core.rundir import RunDir, write_json
from training.launcher import endings, failure_report, local_ranks, raised_ranks, timeouts
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.rank_exit import RankExit
from training.watchdog.start import RanksWatch

SCRIPT = {"path": "main.py", "args": [], "python": "python3"}
ERROR = {
    "rank": 1,
    "guilty_rank": 1,
    "time": 1.0,
    "type": "ValueError",
    "message": "bad sample 17",
    "where": "main.py:3",
    "code": None,
    "before": [],
    "phase": None,
    "disk_full": False,
    "traceback": [],
}
Start = Callable[[str], Attempt]


@pytest.fixture
def start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Two ranks whose code has `rank` and `folder`, of the run."""
    for name in ("PEER_GRACE_S", "SHORT_GRACE_S"):
        monkeypatch.setattr(timeouts, name, 0.0)

    def make(code: str) -> Attempt:
        begin = f"{RANK}rank, folder = int(os.environ['RANK']), Path(sys.argv[1])\n"
        command = [sys.executable, "-c", begin + textwrap.dedent(code), str(run.path)]
        monkeypatch.setattr(local_ranks, "command", lambda *_: command)
        plan = PLAN | {"ranks": 2, "script": SCRIPT}
        return Attempt(run, plan, LocalRanks(range(2), 2, "127.0.0.1", 1), uuid.uuid4().hex)

    return make


# ── a crash after the end

CRASH = """
if rank:
    (folder / "ranks" / "rank1.ended").write_text("{}")
    os.kill(os.getpid(), int(%d))
while not (folder / "go").exists():
    time.sleep(0.01)
%s
"""


def let_go(tried: Attempt, run: RunDir) -> None:
    """Rank 0 continues when the limits have been checked a few times after the exit of rank 1."""
    passes = []

    def count() -> None:
        passes.append(bool(tried.outcome.ended))
        if sum(passes) > 3:
            (run.path / "go").touch()

    tried.each_pass = count


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGABRT, 134), (signal.SIGSEGV, 139)], ids=["SIGABRT", "SIGSEGV"]
)
def test_a_crash_after_the_end_of_a_script_does_not_end_the_other_ranks(
    run: RunDir, start: Start, number: signal.Signals, code: int
) -> None:
    tried = start(CRASH % (number, "(folder / 'saved').touch()"))
    let_go(tried, run)
    outcome = tried.go()
    assert (run.path / "saved").exists() and outcome.ended == [(1, -number), (0, 0)]
    assert outcome.torn_down and failure_report.exit_code(outcome) == code
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["rank"], record["exit_code"], record["torn_down"]) == (1, code, True)
    assert f"killed by {number.name} during teardown" in record["summary"]
    assert not endings.may_help(run, outcome, record), "a restart would train again"


def test_a_failure_after_such_a_crash_is_the_one_that_is_reported(
    run: RunDir, start: Start
) -> None:
    tried = start(CRASH % (signal.SIGABRT, "sys.exit(7)"))
    let_go(tried, run)
    outcome = tried.go()
    assert (outcome.guilty, outcome.torn_down) == ((0, 7), False)
    assert failure_report.exit_code(outcome) == Exit.TRAINING


# ── an end before the others


@pytest.mark.parametrize(
    ("where", "kind"), [("", "uneven"), ("main.py:7", "died")], ids=["last_line", "sys_exit"]
)
def test_the_end_of_a_script_whose_rank_another_one_waits_for(
    run: RunDir, start: Start, where: str, kind: str
) -> None:
    """An end at the last line of the script is not an exit in the middle of it."""
    lost = {"rank": 0, "guilty_rank": 0, "type": "RuntimeError", "time": 2.0}
    lost["message"] = "Connection closed by peer [127.0.0.1]:5006"
    end = {"time": 1.0, "where": where, "status": 0}
    outcome = start(
        f"""
        if rank:
            (folder / "ranks" / "rank1.ended").write_text({json.dumps(end)!r})
            sys.exit(0)
        while not (folder / "ranks" / "rank1.ended").exists():
            time.sleep(0.01)
        (folder / "ranks" / "rank0.error.json").write_text({json.dumps(ERROR | lost)!r})
        sys.exit(1)
        """
    ).go()
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["cause"], record["kind"], record["rank"]) == ("exit_status", kind, 1)
    assert (record["where"], record["exit_code"]) == (where or None, Exit.TRAINING)
    assert ("main.py:3" in record["summary"]) == (kind == "uneven"), "where rank 0 waited"
    assert any("DistributedSampler" in sentence for sentence in record["advice"])
    assert any("sys.exit" in sentence for sentence in record["advice"]) == (kind == "died")


# ── an exception, but no exit


def test_the_exception_of_a_rank_that_hangs_at_its_exit_is_the_failure(
    run: RunDir, start: Start
) -> None:
    tried = start("")
    write_json(run.rank_error(1), ERROR)
    waiting = {0: "all_reduce"}
    tried.failure.of_hang(HangFinding(HANG, 1, "threading.py:1", "is stuck", waiting, {}, 9.0, ""))
    outcome = tried.outcome
    assert (outcome.finding, outcome.guilty) == (None, (1, 1))
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["kind"], record["summary"]) == ("error", "ValueError: bad sample 17")
    assert (record["where"], record["exit_code"]) == ("main.py:3", Exit.TRAINING)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: bad sample 17", "exception"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu_oom"),
    ],
)
def test_the_failure_of_a_rank_that_another_launcher_lets_the_others_wait_for_is_the_cause(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch, line: str, cause: str
) -> None:
    """failure.json must not report a hang: programs read it."""
    monkeypatch.setattr(local_ranks, "watched", lambda plan: "bash")
    monkeypatch.setenv("RANK", "0")
    tried = start("time.sleep(600)")
    death = RankExit("error", 1, "train.py:8", line)
    found = HangFinding("uneven", 1, None, "has ended", {0: "waits"}, {}, 9.0, death=death)
    monkeypatch.setattr(RanksWatch, "look", lambda *_: found)
    log = run.launcher_log("bash")
    printed = (
        'Traceback (most recent call last):\n  File "train.py", line 8, in <module>\n    f()\n'
    )
    log.write_text(f"{printed}{line}\n")
    outcome = tried.go()
    outcome.log_from[log] = 0
    assert outcome.finding is None and outcome.ended == [(None, -signal.SIGKILL)]
    record = failure_report.failure(outcome, run, PLAN)
    assert (record["cause"], record["kind"], record["rank"]) == (cause, "error", 1)
    assert (record["summary"], record["where"]) == (line, "train.py:8")
    assert record["exit_code"] == Exit.TRAINING, "the command has no status of its own"


def test_a_hang_without_an_exception_stays_one(run: RunDir, start: Start) -> None:
    tried = start("")
    write_json(run.rank_error(0), ERROR | {"rank": 0, "guilty_rank": 0})
    tried.failure.of_hang(HangFinding(HANG, 1, "main.py:1", "is stuck", {}, {}, 9.0, ""))
    assert tried.outcome.finding and failure_report.exit_code(tried.outcome) == Exit.HANG


UPLOAD = """
while not (folder / "go").exists():
    (folder / "sent").write_bytes(bytes(1 << 20))
    time.sleep(0.01)
(folder / "uploaded").touch()
sys.exit(1)
"""
RAISES = f"(folder / 'ranks' / f'rank{{rank}}.error.json').write_text({json.dumps(ERROR)!r})\n"


@pytest.mark.parametrize(
    ("limit", "other"),
    [("RAISED_S", "time.sleep(600)"), ("RAISED_ALONE_S", "")],
    ids=["another_one_waits", "alone"],
)
def test_a_rank_that_has_raised_must_exit_within_a_limit(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch, limit: str, other: str
) -> None:
    """The other one does not wait in a collective, so a hang is not found."""
    monkeypatch.setattr(timeouts, limit, 0.1)
    outcome = start(f"if rank:\n    {RAISES}    time.sleep(600)\n{other}").go()
    assert outcome.guilty == (1, 1)
    assert dict(outcome.ended) == {0: -signal.SIGKILL if other else 0, 1: -signal.SIGKILL}
    assert outcome.death and "ValueError: bad sample 17" in outcome.death.how
    assert failure_report.exit_code(outcome) == Exit.TRAINING


@pytest.mark.parametrize(
    "other", ["sys.exit()", f"{RAISES}time.sleep(600)"], ids=["ended", "raised"]
)
def test_the_exit_of_a_rank_that_has_raised_may_take_long_if_no_other_one_waits(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """As an upload of wandb."""
    monkeypatch.setattr(timeouts, "RAISED_S", 2.0)
    monkeypatch.setattr(raised_ranks, "LOOK_S", 0.05)
    first = textwrap.indent(f"(folder / 'first').touch()\n{other}", "    ")
    follows = "while not (folder / 'first').exists():\n    time.sleep(0.01)\n"
    tried = start(f"if not rank:\n{first}\n{follows}{RAISES}{UPLOAD}")
    since = list[float]()

    def count() -> None:
        ended = 0 in dict(tried.outcome.ended) or run.rank_error(0).exists()
        if ended and run.rank_error(1).exists():
            since.append(time.monotonic())
        if since and since[-1] - since[0] > 3.0:
            (run.path / "go").touch()

    tried.each_pass = count
    outcome = tried.go()
    assert outcome.guilty == (1, 1) and dict(outcome.ended)[1] == 1
    assert (run.path / "uploaded").exists()


def test_ranks_that_have_all_raised_and_do_nothing_more_are_ended_soon(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is not a daemon waits for its queue: a restart need not wait."""
    monkeypatch.setattr(timeouts, "RAISED_S", 0.3)
    monkeypatch.setattr(raised_ranks, "LOOK_S", 0.05)
    outcome = start(f"{RAISES}time.sleep(600)").go()
    assert outcome.guilty and dict(outcome.ended) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert outcome.death and "ValueError: bad sample 17" in outcome.death.how


def test_a_disk_that_does_not_answer_does_not_end_the_run(
    run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of another machine, for a moment."""
    real, asked = os.stat, list[str]()

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).endswith(".error.json"):
            asked.append(str(path))
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    tried = start("while not (folder / 'go').exists():\n    time.sleep(0.01)")
    tried.each_pass = lambda: (run.path / "go").touch() if len(asked) > 3 else None
    assert sorted(tried.go().ended) == [(0, 0), (1, 0)] and tried.outcome.guilty is None


# ── processes that outlive their rank


def test_a_process_of_a_script_that_outlives_it_is_named(
    run: RunDir, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """An upload in the background is cut off; a failed rank's processes are not worth a word."""
    tried = start(
        """
        import subprocess
        subprocess.Popen(["sleep", str(1000 + rank)])
        while rank and not (folder / "go").exists():
            time.sleep(0.01)
        sys.exit(rank)
        """
    )
    let_go(tried, run)
    assert tried.go().ended == [(0, 0), (1, 1)]
    err = capfd.readouterr().err
    assert err.count("killed a process left behind by a rank: pid ") == 1
    assert ": sleep 1000\n" in err


# ── a stop request, but no exit


def test_a_script_that_hangs_after_a_stop_request_is_stopped_at_once(
    run: RunDir,
    handlers: None,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(timeouts, "STALL_S", 0.1)
    found = HangFinding(HANG, 0, "main.py:3", "waits", {}, {}, 9.0)
    looked: list[bool] = []

    def look(watch: RanksWatch, started: Any, ended: Any) -> HangFinding | None:
        looked.append(len(list(run.path.glob("asked*"))) == 2)
        return found if looked[-1] else None

    monkeypatch.setattr(RanksWatch, "look", look)
    tried = start(
        """
        signal.signal(signal.SIGTERM, lambda *_: (folder / f"asked{rank}").touch())
        (folder / f"ready{rank}").touch()
        time.sleep(600)
        """
    )

    def ask() -> None:
        if len(list(run.path.glob("ready*"))) == 2:
            tried.each_pass = lambda: None
            os.kill(os.getpid(), signal.SIGTERM)

    tried.each_pass = ask
    outcome = tried.go()
    assert (outcome.killed, outcome.finding, outcome.guilty) == (True, None, None)
    assert sorted(outcome.ended) == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)]
    assert looked.count(True) == 1, "the ranks are on their way out"
    assert failure_report.exit_code(outcome) == Exit.PREEMPTED
    assert failure_report.failure(outcome, run, PLAN)["kind"] == "asked"
    text = "HANG rank 0 waits, at main.py:3, for 9.0 s: stopping the ranks now (again: kill them)"
    assert text in capfd.readouterr().err
