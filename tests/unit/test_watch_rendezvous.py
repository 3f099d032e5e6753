"""A rank that has not reached the rendezvous of the ranks of one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir, read_records
from training.watchdog.heartbeat_watchdog import MISSING_S, HeartbeatWatchdog

PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 3}
MEETING = "rendezvous with the other ranks"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(now[0] * 1e9))
    return now


def test_ranks_that_are_missing_at_the_start_are_reported_once_after_25_s(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.create()
    ranks = [Heartbeat(run.heartbeat(rank), rank) for rank in range(3)]
    for rank, phase in enumerate((MEETING, "importing torch", MEETING)):
        ranks[rank].beat(phase)
    watch, pids = HeartbeatWatchdog(run, PLAN, range(3)), dict.fromkeys(range(3), os.getpid())

    def warnings(until: float) -> list[dict[str, Any]]:
        while clock[0] < until:
            clock[0] += 0.5
            assert watch.look(pids) is None
        return [e for e in read_records(run.events) if e["event"] == "warning"]

    assert MISSING_S <= 30 - 5 and warnings(1000 + MISSING_S) == []
    (one,) = warnings(1000 + MISSING_S + 1)
    assert one["code"] == "warning.rank_missing"
    assert "0, 2" in one["text"]
    assert "rank 1" in one["text"] and "importing torch" in one["text"]
    assert warnings(1000 + 4 * MISSING_S) == [one]
    assert capsys.readouterr().err.count("[WARNING]") == 1


def test_ranks_that_prepare_data_after_the_rendezvous_are_not_missing(
    tmp_path: Path, clock: list[float]
) -> None:
    run = RunDir(tmp_path)
    run.create()
    for rank, phase in enumerate((MEETING, "preparing data")):
        Heartbeat(run.heartbeat(rank), rank).beat(phase)
    watch = HeartbeatWatchdog(run, PLAN, range(2))
    for _ in range(100):
        clock[0] += 0.5
        assert watch.look({0: os.getpid(), 1: os.getpid()}) is None
    assert list(read_records(run.events)) == []
