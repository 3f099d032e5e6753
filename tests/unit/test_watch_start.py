"""What watches the ranks of one start, and what becomes of the training when that itself fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from training.heartbeat import Heartbeat
from training.launch.team import Team
from training.rundir import RunDir
from training.watch import collectives, native
from training.watch.collectives import Call
from training.watch.finding import DESYNC, HANG, STOPPED, Finding
from training.watch.start import RanksWatch

PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 2}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def test_an_error_of_the_watch_ends_the_watch_alone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = RanksWatch(run, PLAN, Team(range(2), 2))
    monkeypatch.setattr(native.Watch, "look", lambda self, pids: 1 / 0)
    assert watch.look({0: os.getpid()}, {}) is None
    said = capsys.readouterr().err
    assert "hang detection is off for this start: ZeroDivisionError: division by zero" in said
    assert "1 / 0" in run.watch_error.read_text()
    assert watch.look({0: os.getpid()}, {}) is None and capsys.readouterr().err == "", "said once"


def test_a_healthy_rank_is_no_finding_and_zero_turns_it_off(run: RunDir) -> None:
    for rank in range(2):
        Heartbeat(run.heartbeat(rank), rank).beat("fetch")
    assert RanksWatch(run, PLAN, Team(range(2), 2)).look({0: os.getpid(), 1: os.getpid()}, {}) is None
    off = native.Watch(run, PLAN | {"config": {"hang_timeout": 0}}, range(2))
    assert off.look({0: os.getpid()}) is None


def test_a_rank_that_never_comes_is_awaited_and_then_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    Heartbeat(run.heartbeat(0), 0).beat("meeting the other ranks")
    watch = native.Watch(run, PLAN, range(2))
    clock[0] += 200
    assert watch.look({0: os.getpid(), 1: os.getpid()}) is None
    clock[0] += 200
    found = watch.look({0: os.getpid(), 1: os.getpid()})
    assert found and (found.kind, found.rank) == (HANG, 1) and "has given no sign since it was started" in found.how


def test_a_script_is_also_seen_by_what_its_ranks_have_called(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RanksWatch(run, PLAN | {"script": {"path": "main.py"}}, Team(range(2), 2))
    said = {0: [Call("0", 7, "barrier", "")], 1: [Call("0", 7, "all_reduce", "float [9]")]}
    monkeypatch.setattr(collectives, "read", lambda folder, rank: said[rank])
    waits = Finding(HANG, 0, "main.py:3", "stands", {1: "waits"}, {}, 4.0)
    found = watch._compared(waits, said)
    assert (found.kind, found.rank, found.where) == (DESYNC, None, None)
    assert found.how == "the ranks do not do the same at collective 7: rank 0: barrier; rank 1: all_reduce of float [9]"
    stopped = Finding(STOPPED, 0, None, "is stopped", {}, {}, 4.0)
    assert watch._compared(stopped, said) is stopped


def test_a_job_that_was_frozen_is_given_its_time_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `docker pause` or `scontrol suspend`: the clock goes on, and nobody did anything."""
    clock, looked = [1000.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock[0] * 1e9))
    writer = Heartbeat(run.heartbeat(0), 0)
    writer.step = 1
    writer.beat("fetch")
    writer.step = 9
    writer.beat("forward")
    watch = native.Watch(run, PLAN | {"ranks": 1}, range(1))
    monkeypatch.setattr(native.Watch, "_examine", lambda self, *facts: looked.append(clock[0]))
    watch.look({0: os.getpid()})
    clock[0] += 500
    watch.look({0: os.getpid()})
    for _ in range(12):
        clock[0] += 0.25
        watch.look({0: os.getpid()})
    assert looked == [], "three seconds after it woke up"
    clock[0] += 0.5
    watch.look({0: os.getpid()})
    assert looked == [clock[0]]
