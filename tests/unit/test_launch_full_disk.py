"""A disk that is full or read-only by now: records of the launcher are lost, but not the run; a
restart whose plan cannot be written does not happen."""

from __future__ import annotations

import errno
import os
import signal
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.node_plans import plan as node_plan
from tests.unit.test_launch_attempt import PLAN, RANK
from tests.unit.test_launch_recovery import plan, record
from training.core import rundir
from training.core.errors import Exit, UserError
from training.core.heartbeat import FINISHED
from training.core.rundir import RunDir, read_json, read_records, write_json
from training.launcher import endings, local_ranks, several_machines
from training.launcher.attempt import Attempt
from training.launcher.coordinator import Coordinator
from training.launcher.growth import Growth
from training.launcher.json_socket import Message
from training.launcher.leader import Leader
from training.launcher.local_ranks import LocalRanks
from training.launcher.machine import Launch
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.launcher.restart import Restart, Team
from training.launcher.several_machines import Follower

FULL = "No space left on device"
OUT_OF_MEMORY = record(cause="gpu_oom", kind="error")
ON_THE_CARD = {"waiting": {}, "phases": {}, "evidence": [], "advice": [], "stacks": None}
REPORTED: Any = OUT_OF_MEMORY | ON_THE_CARD | {"exit_code": 4, "log": "rank1.log", "victim": False}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("DUET_ATTEMPT", "")  # removed at the end of the test
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def full(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(rundir, "write_bytes", fails)


@pytest.fixture
def full_for_the_plan(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write = rundir.write_bytes

    def fails(path: Path, content: bytes) -> None:
        if path == run.plan:
            raise OSError(errno.ENOSPC, FULL)
        write(path, content)

    monkeypatch.setattr(rundir, "write_bytes", fails)


def script(run: RunDir) -> Any:
    words = {"path": "fit.py", "args": [], "python": None, "python_reason": "", "module": False}
    return plan() | {"script": words, "command": {"cwd": str(run.path)}, "created": 0.0}


# ── the end


def test_a_script_that_has_filled_the_disk_has_finished(
    run: RunDir, full: None, capfd: pytest.CaptureFixture[str]
) -> None:
    own = script(run)
    outcome, recovery = Outcome(ours=False, ended=[(0, 0), (1, 0)]), Recovery(run, own)
    assert endings.regular_end(run, own, PostRun(run, own), outcome, recovery) == Exit.DONE
    logged = capfd.readouterr().err
    assert "[WARNING]" in logged and f"cannot write {run.summary}: {FULL}\n" in logged
    assert "[SUCCESS]" in logged


def test_the_end_of_a_training_with_restarts(
    run: RunDir, full: None, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = Recovery(run, plan())  # type: ignore[arg-type]
    assert tried.again(record(), Outcome())  # type: ignore[arg-type]
    run.summary.write_text('{"steps": 60}')
    assert tried.finish().startswith(" after 1 restart (")
    assert f"cannot write {run.summary}: {FULL}\n" in capfd.readouterr().err


def test_a_file_that_cannot_be_deleted_does_not_end_the_run(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (run.failure, run.plan_before, run.token("a1b2")):
        path.mkdir()  # unlink() fails
    run.forget_before({"created": 0.0}, run.summary)  # type: ignore[typeddict-item]
    run.remove_tokens()
    assert Recovery(run, plan()).stop(15) == Exit.PREEMPTED  # type: ignore[arg-type]
    logged = capfd.readouterr().err
    for path in (run.failure, run.plan_before, run.token("a1b2")):
        assert f"cannot delete {path}: " in logged


# ── the start


def test_ranks_run_without_the_record_of_their_processes(
    run: RunDir,
    full: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rank = [sys.executable, "-c", f"{RANK}beat({FINISHED!r})", str(run.path)]
    monkeypatch.setattr(local_ranks, "command", lambda *_: rank)
    outcome = Attempt(run, PLAN, LocalRanks(range(1), 1), uuid.uuid4().hex).go()  # type: ignore[arg-type]
    assert outcome.ended == [(0, 0)] and not outcome.guilty
    assert f"cannot write {run.supervisor}: {FULL}\n" in capfd.readouterr().err


def test_no_rank_is_left_where_the_log_of_one_cannot_be_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.rank_log(1).mkdir()  # open() fails
    sleeps = [sys.executable, "-c", "import time; time.sleep(3600)"]
    monkeypatch.setattr(local_ranks, "command", lambda *_: sleeps)
    team = LocalRanks(range(2), 2, "127.0.0.1", 1)
    tried = Attempt(run, PLAN, team, uuid.uuid4().hex)
    with pytest.raises(UserError, match=f"cannot write {run.rank_log(1)}: ") as refused:
        tried.go()
    assert refused.value.code == Exit.TRAINING
    ranks = tried.children.alive.values()
    assert [rank.popen.returncode for rank in ranks] == [-signal.SIGKILL] * 2
    assert "left behind" not in capfd.readouterr().err


# ── a restart


def test_no_restart_without_its_plan(run: RunDir, full: None) -> None:
    own = plan()
    tried = Recovery(run, own)  # type: ignore[arg-type]
    assert not tried.again(OUT_OF_MEMORY, Outcome())  # type: ignore[arg-type]
    assert tried.given_up == f"not restarted: cannot write {run.plan}: {FULL}"
    assert [event["text"] for event in read_records(run.events)] == [tried.given_up]
    assert own["config"]["device_batch_size"] == 8 and tried.attempt == 1


def test_no_restart_in_a_folder_that_cannot_be_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests may run as root, which may write everywhere
    monkeypatch.setattr(os, "access", lambda *_: False)
    tried = Recovery(run, plan())  # type: ignore[arg-type]
    assert not tried.again(record(), Outcome())  # type: ignore[arg-type]
    assert tried.given_up == f"not restarted: {run.path} cannot be written"


@pytest.mark.usefixtures("full_for_the_plan")
def test_without_the_plan_for_more_ranks_the_run_ends_with_its_summary(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    own = plan()
    own["elastic"] = {"seats": [0], "lost": [], "rejoined": [], "gpus": [], "bindings": []}
    own["elastic"] |= {"ranks": 2, "min_ranks": 1, "device_batch_size": None}
    write_json(run.summary, {"status": "stopped"})
    growth, outcome = Growth(Recovery(run, own)), Outcome(resized=True)  # type: ignore[arg-type]
    growth._team = Team((0, 1), back=(1,))
    assert not growth.grows(outcome, Exit.PREEMPTED)
    assert own["elastic"]["seats"] == [0] and run.summary.exists()
    why = f"not restarted: cannot write {run.plan}: {FULL}"
    assert "[ERROR] " in (logged := capfd.readouterr().err) and f"{why}\n" in logged
    assert [event["text"] for event in read_records(run.events)] == [why]


# ── several machines


class Line:
    """To node 0, which orders a restart with a smaller batch."""

    stopped = lost_leader = None

    def settle(self, known: Any) -> Any:
        return known

    def decide(self, order: Message | None) -> Message:
        return {"changes": {"device_batch_size": 4}, "why": "out of memory"}


@pytest.fixture
def follower(run: RunDir) -> Follower:
    own = plan() | {"place": {"node_rank": 1, "nnodes": 2}, "shared": True}
    other = RunDir(run.path, 1)
    other.create()
    write_json(other.own_plan, own)
    made = object.__new__(Follower)  # without a connection
    made.launch = Launch(other, own, PostRun(other, own), "70ce")  # type: ignore[arg-type]
    made._line = Line()  # type: ignore[assignment]
    return made


def test_another_machine_ends_without_its_plan(
    follower: Follower, full: None, capfd: pytest.CaptureFixture[str]
) -> None:
    launch, outcome = follower.launch, Outcome(guilty=(1, 1), here=(1, 1))
    with launch.signals:
        assert follower._recover(outcome) == Exit.TRAINING
        assert follower._join() == Exit.TRAINING
    assert launch.recovery.attempt == 1
    known = read_json(launch.run.own_plan) or {}
    assert known["config"]["device_batch_size"] == 8 == launch.plan["config"]["device_batch_size"]
    logged = capfd.readouterr().err
    why = f"not restarted: cannot write {launch.run.own_plan}: {FULL}"
    assert f"training failed, {why}\n" in logged and "[ERROR]" in logged
    assert not list(read_records(launch.run.events)), "node 0 writes the run"


class Others:
    """Node 0's connections: node 1 is connected, unless it is `away`."""

    def __init__(self, run: RunDir, *, shared: bool = True, away: bool = False) -> None:
        self.wires, self._shared = ({} if away else {1: None}), shared
        self.place, self.confirmed = SimpleNamespace(node_rank=0), {0, 1}
        self.ready_again: tuple[int, ...] = ()
        self.decided: list[tuple[Message | None, int]] = []
        self._run = run

    def there(self, node: int) -> bool:
        return node in self.wires

    def missing(self) -> list[int]:
        return [node for node in (1,) if not self.there(node)]

    def other_disks(self) -> bool:
        return bool(self.wires) and not self._shared

    def names(self, nodes: Any) -> str:
        return ", ".join(f"node {node}" for node in nodes)

    def decide(self, order: Message | None, code: int = 0) -> Message | None:
        self.decided.append((order, code))
        if order:
            known = read_json(self._run.plan) or {}
            assert known["config"]["device_batch_size"] == 4, "the plan is written first"
        return order


def leader(run: RunDir, line: Others, *, elastic: bool) -> Leader:
    own = plan()
    if elastic:
        own["elastic"] = {"seats": [0, 1], "lost": [], "rejoined": [], "ranks": 2, "per_node": 1}
        own["elastic"]["device_batch_size"] = 8
    made = object.__new__(Leader)
    made.launch = Launch(run, own, PostRun(run, own), "70ce")  # type: ignore[arg-type]
    made._line = line  # type: ignore[assignment]
    chosen = Restart(1, {"device_batch_size": 4}, "out of memory")
    made.launch.recovery._failures = [made.launch.recovery._failure(REPORTED, Outcome())]
    made.launch.recovery.choose = lambda *_: chosen  # type: ignore[method-assign]
    return made


def test_the_others_restart_once_node_0_has_its_plan(run: RunDir) -> None:
    line = Others(run)
    made = leader(run, line, elastic=False)
    assert made.recover(Outcome(guilty=(1, 1)), REPORTED) is None  # type: ignore[arg-type]
    assert [bool(order) for order, _ in line.decided] == [True]


@pytest.mark.parametrize("elastic", [False, True], ids=["all", "min_ranks"])
def test_the_others_are_not_restarted_without_the_plan_of_node_0(
    run: RunDir, full_for_the_plan: None, elastic: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    line = Others(run)
    made = leader(run, line, elastic=elastic)
    code = made.recover(Outcome(guilty=(1, 1)), REPORTED)
    assert code == Exit.TRAINING
    assert line.decided == [(None, code)] and not made.launch.ending.left
    why = f"not restarted: cannot write {run.plan}: {FULL}"
    assert f"training failed, {why}\n" in capfd.readouterr().err
    assert run.failure.exists()


def test_a_machine_with_its_own_disk_may_continue_without_the_plan_of_node_0(
    run: RunDir, full_for_the_plan: None, capfd: pytest.CaptureFixture[str]
) -> None:
    line = Others(run, shared=False)
    made = leader(run, line, elastic=True)
    assert made.recover(Outcome(guilty=(1, 1)), REPORTED) == Exit.LEFT
    assert not line.decided and made.launch.ending.left
    assert f"cannot write {run.plan}: {FULL}: the other machines" in capfd.readouterr().err


@pytest.mark.usefixtures("full_for_the_plan")
def test_the_others_are_not_restarted_with_more_ranks_without_the_plan_of_node_0(
    run: RunDir,
) -> None:
    line = Others(run)
    made = leader(run, line, elastic=True)
    elastic = {
        "seats": [0],
        "lost": [{"seat": 1, "gpu": None, "cause": "killed"}],
        "gpus": [],
        "bindings": [],
    }
    made.launch.plan["elastic"] |= elastic  # type: ignore[typeddict-item]
    write_json(run.summary, {"status": "stopped"})
    made._more = Team((0, 1), back=(1,), size=4)
    outcome = Outcome(resized=True)
    assert made._grows(outcome, Exit.PREEMPTED) is None
    assert line.decided == [(None, 0)] and run.summary.exists()


def test_a_machine_that_is_lost_in_the_pause_ends_the_run(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    line = Others(run, away=True)
    made = leader(run, line, elastic=False)
    code = made.recover(Outcome(guilty=(1, 1)), REPORTED)
    assert line.decided == [(None, code)] and run.failure.exists()
    assert "training failed, not restarted: node 1 cannot be reached\n" in capfd.readouterr().err
    assert not [r for r in read_records(run.events) if r["event"] == "restart"]


def test_the_list_of_machines_cannot_be_deleted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.machines.mkdir()  # unlink() fails
    own = plan() | node_plan(0, local_ranks.free_port(node_plan(0, 0)["place"]["master_addr"]))
    ending = PostRun(run, own)

    def once(leader: Leader) -> int:
        assert ending.restarts is leader.launch.recovery.restarts  # for the notification
        return 0

    monkeypatch.setattr(several_machines.Leader, "once", once)
    with Coordinator(own) as line:
        assert several_machines.train(run, own, ending, line, "70ce") == 0
    assert f"cannot delete {run.machines}: " in capfd.readouterr().err
