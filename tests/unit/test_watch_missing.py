"""The rank that the others waited for when torch's timeout of a collective came first."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit import targets
from tests.unit.verdicts import failed, new_run, report_error
from training.core.rundir import RunDir
from training.diagnose import result
from training.watchdog import missing_rank, rank_exit
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.probes import flight_recorder

GLOO = "Timed out waiting 6000ms for recv operation to complete"
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=9000)"
SIGNALLED = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] Observed flight recorder dump signal from another rank"
)
BARRIER = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 4000 ms"
LOG = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\nRuntimeError: {GLOO}\n'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


@pytest.mark.parametrize(
    ("roles", "reported", "rank"),
    [
        (("waits", "locks"), (), 1),
        (("locks", "locks"), (), None),
        (("locks", "locks"), (0,), 1),
        (("waits", "waits"), (), None),
    ],
)
def test_the_only_rank_that_is_not_in_a_collective(
    tmp_path: Path, roles: Sequence[str], reported: Sequence[int], rank: int | None
) -> None:
    with targets.ranks(tmp_path, *roles) as (pids, script):
        found = missing_rank.find(pids, 2, "a.py:3", reported, lambda rank: False)
    place = f"{script}:{targets.line_of(script, 'lock.acquire()', 'locks')}"
    assert (found.rank, found.where) == (rank, place if rank is not None else None)
    assert set(found.waiting) == {0, 1, 2} - {rank, *reported}
    assert set(found.stacks) == {0, 1} - {*reported}


def test_a_rank_in_the_middle_of_its_model_may_wait_just_as_much(tmp_path: Path) -> None:
    """For a place in the queue of its GPU, or already in the abort of its own timeout."""
    with targets.ranks(tmp_path, "locks", "locks") as (pids, _):
        assert missing_rank.find(pids, 2, None, (), lambda rank: rank == 0).rank == 1
        assert missing_rank.find(pids, 2, None, (), lambda rank: True).rank is None


@pytest.mark.parametrize(
    ("pending", "text", "waits"),
    [
        (True, "", True),
        (False, "", False),
        (None, "", None),
        (False, f"[rank1]: {NCCL}\n", True),
        (False, f"[rank1]: {SIGNALLED}\n", False),  # so is the rank that the others wait for
        (None, f"[rank1]: {SIGNALLED}\n", True),
    ],
)
def test_a_rank_with_an_unfinished_collective_or_a_timeout_of_its_own_waits(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    pending: bool | None,
    text: str,
    waits: bool | None,
) -> None:
    monkeypatch.setattr(flight_recorder, "pending", lambda folder, rank: pending)
    run.rank_log(1).write_text(text)
    assert rank_exit.waits_too(run, 1, {}) is waits


@pytest.mark.parametrize("rank", [0, None])
def test_the_rank_that_reports_a_timeout_is_not_guilty(run: RunDir, rank: int | None) -> None:
    report_error(run, 1, "RuntimeError", GLOO)
    missing = HangFinding(
        HANG, rank, "b.py:6" if rank == 0 else None, "is at b.py:6", {1: "timed out"}, {}, 0.4
    )
    record = failed(run, rank=1, missing=missing)
    assert (record["cause"], record["victim"]) == ("collective_timeout", True)
    assert (record["rank"], record["where"]) == (rank, missing.where)
    assert record["waiting"] == {"1": "timed out"}
    assert failed(run, rank=1)["rank"] is None, "the ranks were not examined"


def test_a_monitored_barrier_names_the_missing_rank(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", BARRIER)
    assert rank_exit.timed_out(run, 0, 1, {})
    seen = HangFinding(HANG, 1, "b.py:6", "is at b.py:6", {0: "timed out"}, {}, 0.4, folder="/h/1")
    record = failed(run, rank=0, missing=seen)
    assert (record["cause"], record["victim"]) == ("collective_timeout", True)
    assert (record["rank"], record["where"], record["stacks"]) == (1, "b.py:6", "/h/1")
    assert not any("py-spy" in sentence for sentence in record["advice"])
    assert any("/h/1" in sentence for sentence in record["advice"])
    unclear = failed(run, rank=0, missing=replace(seen, rank=None, where=None))
    assert (unclear["rank"], unclear["where"]) == (1, None), "by the message"


def test_an_earlier_failure_of_another_rank_is_the_cause(run: RunDir) -> None:
    report_error(run, 0, "ValueError", "planted", time=1.0)
    report_error(run, 1, "RuntimeError", GLOO, time=2.0)
    record = failed(run, rank=1)
    assert (record["cause"], record["rank"], record["victim"]) == ("exception", 0, False)


def test_an_abort_by_the_watchdog_of_nccl_is_a_timeout(run: RunDir) -> None:
    run.rank_log(1).write_text(f"[rank1]: {NCCL} ran for 9011 ms\nterminate called\n")
    assert rank_exit.timed_out(run, 1, -signal.SIGABRT, {})
    assert not rank_exit.timed_out(run, 1, 1, {})
    record = failed(run, -signal.SIGABRT)
    assert (record["cause"], record["rank"], record["victim"]) == ("collective_timeout", None, True)


@pytest.mark.parametrize(("other", "rank"), [("", 1), ("step 5\n", None)])
def test_the_only_rank_that_logged_nothing(tmp_path: Path, other: str, rank: int | None) -> None:
    logs = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    for log, text in zip(logs, (LOG, other), strict=True):
        log.write_text(text)
    found = result.diagnose(logs)
    assert (found["cause"], found["rank"]) == ("collective_timeout", rank)
