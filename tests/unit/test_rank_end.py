"""The end of failed ranks without a supervisor: one card and one failure.json."""

from __future__ import annotations

import errno
import signal
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit import verdicts
from training.cli import draft, train
from training.core import log
from training.core.contracts.plan import Plan
from training.core.errors import Exit, Problem, UserError
from training.core.rundir import VARIABLE, RunDir, read_json, read_records, write_json
from training.host.process import StopAsked
from training.inspector import distributed
from training.launcher import endings, failure_report, rank_end
from training.launcher.outcome import Outcome
from training.trainer import error_file
from training.trainer.rank_data import RankEnded
from training.trainer.sanity_checks import NotFinite


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    made = verdicts.plan(created=0.0, log_file=str(tmp_path / "run.log"), resume=None)
    return cast("Plan", made)


@pytest.fixture
def run(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(log, "_log", None)
    monkeypatch.delenv("DUET_SUPERVISED", raising=False)
    made = verdicts.new_run(tmp_path)
    write_json(made.plan, plan)
    return made


def fail(run: RunDir, plan: Plan, rank: int, error: Exception) -> tuple[int, Any]:
    file = run.rank_log(rank)
    begins = file.stat().st_size if file.exists() else 0
    return rank_end.report(run, plan, rank, error_file.record(run, rank, error), begins)


def test_the_first_failure_is_the_card_and_others_are_one_line(
    run: RunDir, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    run.rank_log(1).write_text("ValueError: of an earlier start\n")
    code, record = fail(run, plan, 1, ValueError("planted"))
    card = capfd.readouterr().err
    assert code == Exit.TRAINING and read_json(run.failure) == record
    assert (record["rank"], record["cause"], record["kind"]) == (1, "exception", "error")
    assert (record["summary"], record["exit_code"]) == ("ValueError: planted", Exit.TRAINING)
    assert record["phases"] == {"0": "step 7: forward", "1": "step 7: forward"}
    assert record["log"] == str(run.rank_log(1))
    assert record["evidence"] == ["ValueError: planted"], "nothing of the earlier start"
    assert record["summary"] in card and record["advice"][0] in card
    assert Path(plan["log_file"]).read_text() in card, "also of a rank other than 0"
    lost = RuntimeError("Connection closed by peer [10.0.0.2]:4")
    assert fail(run, plan, 0, lost) == (Exit.TRAINING, None)
    (line,) = capfd.readouterr().err.splitlines()
    assert str(lost) in line and str(run.failure) in line and "rank 0" in line
    assert read_json(run.failure) == record
    assert [e["rank"] for e in read_records(run.events) if e["event"] == "failure"] == [1]


@pytest.mark.parametrize(
    ("error", "cause", "guilty"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu_oom", 1),
        (NotFinite("loss is nan on rank 1 at step 5", 1), "nan_loss", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", 1),
        (RuntimeError("Connection closed by peer [10.0.0.2]:4"), "peer_died", 1),
        (RankEnded("rank 0 has ended", 0), "peer_died", 0),
    ],
)
def test_causes_of_a_rank_alone(
    run: RunDir, plan: Plan, error: Exception, cause: str, guilty: int
) -> None:
    code, record = fail(run, plan, 1, error)
    assert (code, record["cause"], record["rank"]) == (Exit.TRAINING, cause, guilty)
    assert record["victim"] == (type(error) is RuntimeError and cause == "peer_died")
    assert record["advice"]


def gpu(name: str) -> dict[str, Any]:
    uuid = f"GPU-{name}-0000-4000-8000-000000000000"
    return {"index": 0, "uuid": uuid, "name": "Card", "total_bytes": 32 << 30, "free_bytes": 1}


def test_the_gpus_of_a_rank_are_those_that_it_sees(
    run: RunDir, plan: Plan, fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which has written the plan, sees others: on another machine, or one per rank."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    cuda: Any = {**plan, "device": {"value": "cuda"}}
    write_json(run.plan, cuda | {"schema_version": 1, "gpus": [gpu("0000000b")]})
    own = draft._planned(run, cuda | {"gpus": [gpu("000000a0")]})
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    code, record = fail(run, own, 1, error)
    assert (code, record["cause"], record["rank"]) == (Exit.TRAINING, "gpu_oom", 1)


def test_a_rejected_input_is_recorded_without_a_card(
    run: RunDir, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank has reported it."""
    for rank in (0, 1):
        assert rank_end.report(run, plan, rank, Exit.CONFIG, 0)[0] == Exit.CONFIG
    found = read_json(run.failure) or {}
    assert (found["cause"], found["rank"], found["exit_code"]) == ("config_error", 0, Exit.CONFIG)
    assert capfd.readouterr().err == ""


def test_a_plan_of_a_later_version_is_reported(
    run: RunDir, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    write_json(run.plan, {**plan, "schema_version": 99})
    environ = {VARIABLE: str(run.path), train.SUPERVISED: "1"}
    assert train.main([], environ) == Exit.CONFIG
    assert "99" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("watched", "first", "shown"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_rank_that_alone_rejects_its_input_reports_it(
    run: RunDir,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    watched: bool,
    first: bool,
    shown: bool,
) -> None:
    """Of several ranks with a problem the first one does. `shown`: by the rank itself."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(distributed, "is_first", lambda key: first)
    error = UserError(Problem("data.too_short", "planted", "more", ["command"]))
    assert train._report(error, run, plan, watched=watched) == Exit.CONFIG
    assert "planted" in run.rank_log(1).read_text()
    assert ("planted" in capfd.readouterr().err) == shown
    record = rank_end.report(run, plan, 1, Exit.CONFIG, 0)[1]
    assert record and ("rejected" in record) == first
    assert (record["cause"], record["rank"], record["where"]) == ("config_error", 1, None)
    if watched:
        endings.report_end(run, plan, Outcome(), record, "")
        text = capfd.readouterr().err
        assert all(word in text for word in ("rank 1", socket.gethostname(), "planted", "command"))


def test_a_rejected_input_is_reported_on_a_full_disk(
    run: RunDir, plan: Plan, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*of: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(error_file.rundir, "write_json", full)
    error_file.note(run, 1, UserError(Problem("data.differs", "planted: at least")))
    printed = capfd.readouterr().err.partition("; ")[2]
    outcome = Outcome(guilty=(1, 2), here=(1, 2), unwritten={1: printed.strip()})
    record = failure_report.failure(outcome, run, plan)
    assert [one["text"] for one in record["rejected"]] == ["planted: at least"]
    endings.report_end(run, plan, outcome, record, "")
    assert "planted: at least" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("nnodes", "reported", "shown"), [(1, False, False), (2, False, True), (2, True, False)]
)
def test_rank_0_reports_its_problem_although_a_rank_of_another_machine_was_first(
    run: RunDir,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    nnodes: int,
    reported: bool,
    shown: bool,
) -> None:
    """The report of that one may not reach the console of rank 0."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(distributed, "is_first", lambda key: False)
    plan["place"]["nnodes"] = nnodes
    error = UserError(Problem("data.differs", "planted"), said_by_another=reported)
    assert train._report(error, run, plan, watched=True) == Exit.CONFIG
    assert ("planted" in capfd.readouterr().err) == shown


@pytest.mark.parametrize(
    ("nnodes", "ended", "shown"),
    [(1, [(1, 2), (0, 2)], True), (2, [(1, 2), (0, 2)], False), (2, [(1, 2), (0, 1)], True)],
)
def test_what_rank_0_has_reported_too_is_not_repeated(
    run: RunDir,
    plan: Plan,
    capfd: pytest.CaptureFixture[str],
    nnodes: int,
    ended: list[tuple[int | None, int]],
    shown: bool,
) -> None:
    """On one machine it reports nothing if another rank was first."""
    rejected = {"code": "data.differs", "text": "planted"}
    verdicts.report_error(run, 1, "UserError", "planted", rejected=[rejected], exit_code=2)
    plan["place"]["nnodes"] = nnodes
    outcome = Outcome(ended=ended, guilty=(1, 2), here=(1, 2))
    record = failure_report.failure(outcome, run, plan)
    endings.report_end(run, plan, outcome, record, "")
    assert ("planted" in capfd.readouterr().err) == shown


def test_a_start_that_was_withdrawn_or_is_older_keeps_its_files(
    run: RunDir, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {"launch": "fedcba9876543210", "status": "done"}
    write_json(run.plan, {**plan, "launch": before["launch"]})
    write_json(run.summary, before)
    assert fail(run, plan, 1, RuntimeError("rank 0 has ended")) == (Exit.TRAINING, None)
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert not run.failure.exists() and read_json(run.summary) == before
    write_json(run.plan, plan)
    write_json(run.failure, before)
    assert fail(run, plan, 1, RuntimeError("planted"))[1] == read_json(run.failure)
    assert not run.summary.exists(), "results of the earlier start"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_before_the_training_began(
    run: RunDir, plan: Plan, capfd: pytest.CaptureFixture[str], resumed: bool
) -> None:
    """A resumed run is restored."""
    before = {**plan, "launch": "fedcba9876543210"}
    plan["resume"] = str(run.path) if resumed else None
    if resumed:
        write_json(run.plan_before, before)
    write_json(run.plan, plan)
    for asked in (StopAsked(signal.SIGUSR1), StopAsked(signal.SIGTERM)):  # of two ranks
        assert rank_end.stopped(run, plan, asked) == Exit.PREEMPTED
    assert len(capfd.readouterr().err.splitlines()) == 1
    found = read_json(run.failure)
    if resumed:
        assert found is None and read_json(run.plan) == before
    else:
        assert found and (found["cause"], found["kind"]) == ("preempted", "asked")
        assert found["exit_code"] == Exit.PREEMPTED
    assert rank_end.stopped(run, plan, KeyboardInterrupt()) == Exit.INTERRUPTED
