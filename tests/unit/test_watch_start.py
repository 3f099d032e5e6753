"""Hang detection of one attempt, and the training when hang detection itself fails."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from training.core.heartbeat import Heartbeat, read_all
from training.core.rundir import RunDir
from training.watchdog import discovery, heartbeat_watchdog
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.probes import procfs, stacks
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.start import RanksWatch

PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 2}
SCRIPT = {
    "script": {"path": "main.py", "python": "python3"},
    "launcher": {"value": "spawn", "reason": ""},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def test_an_internal_error_turns_hang_detection_off_for_a_while(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    watch = RanksWatch(run, PLAN, range(2), 2)
    monkeypatch.setattr(heartbeat_watchdog.HeartbeatWatchdog, "look", lambda self, pids: 1 / 0)
    for off_s in (60, 120, 240, 480):
        assert watch.look({0: os.getpid()}, {}) is None
        logged = capsys.readouterr().err
        assert f"hang detection is off for {off_s} s: ZeroDivisionError: division by zero" in logged
        assert "1 / 0" in run.watch_error.read_text()
        clock[0] += off_s - 1
        assert watch.look({0: os.getpid()}, {}) is None and capsys.readouterr().err == "", (
            "reported once"
        )
        clock[0] += 2
    assert watch.look({0: os.getpid()}, {}) is None
    assert "hang detection is off for this attempt: ZeroDivisionError" in capsys.readouterr().err
    clock[0] += 1e9
    assert watch.look({0: os.getpid()}, {}) is None and capsys.readouterr().err == ""


def test_a_single_error_is_forgotten(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = [1000.0], HangFinding(HANG, 0, None, "is stuck", {}, {}, 4.0)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    watch = RanksWatch(run, PLAN, range(2), 2)
    monkeypatch.setattr(heartbeat_watchdog.HeartbeatWatchdog, "look", lambda self, pids: 1 / 0)
    assert watch.look({0: os.getpid()}, {}) is None
    monkeypatch.setattr(heartbeat_watchdog.HeartbeatWatchdog, "look", lambda self, pids: found)
    assert watch.look({0: os.getpid()}, {}) is None
    clock[0] += 61
    assert watch.look({0: os.getpid()}, {}) is found


def test_errors_are_forgotten_after_an_hour_without_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = [1000.0], list[bool]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    watch = RanksWatch(run, PLAN, range(2), 2)

    def look(self: object, pids: object) -> None:
        looks.append(True)
        if fails:
            raise ZeroDivisionError

    monkeypatch.setattr(heartbeat_watchdog.HeartbeatWatchdog, "look", look)
    for _ in range(10):
        fails = True
        watch.look({0: os.getpid()}, {})
        fails = False
        for _ in range(2):
            clock[0] += 3700
            watch.look({0: os.getpid()}, {})
    assert len(looks) == 30, "never off for the attempt"


def test_no_internal_error_escapes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = Heartbeat(run.heartbeat(0), 0)
    beat.beat("fetch")
    (read,) = read_all(run.heartbeats, range(1))
    monkeypatch.setattr(
        heartbeat_watchdog.HeartbeatWatchdog, "patience_s", lambda self, beat: 1 / 0
    )
    watch = RanksWatch(run, PLAN, range(2), 2)
    assert watch.patience_s(read) == 0.0 and "ZeroDivisionError" in capsys.readouterr().err
    assert watch.patience_s(read) == 0.0 and capsys.readouterr().err == ""
    monkeypatch.setattr(ScriptWatch, "close", lambda self: 1 / 0)
    RanksWatch(run, PLAN | SCRIPT, range(2), 2).close()
    assert "hang detection is off for 60 s: ZeroDivisionError" in capsys.readouterr().err


def test_ranks_of_torchrun_that_start_late_and_exit_early(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = [1000.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    seen: list[tuple[dict[int, int], dict[int, int]]] = []
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: seen.append((pids, ended)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as leaves:
        there = {1: os.getpid()}
        monkeypatch.setattr(discovery, "below", lambda pid: asked.append(pid) or dict(there))
        watch = RanksWatch(run, PLAN | SCRIPT, range(2), 2)
        watch.look({None: 7}, {})
        there[0] = leaves.pid
        watch.look({None: 7}, {})
        assert seen == [({1: os.getpid()}, {})] * 2 and asked == [7], "once a second"
        clock[0] += 1.1
        watch.look({None: 7}, {})
        assert seen[-1] == ({0: leaves.pid, 1: os.getpid()}, {})
        clock[0] += 1.1
        watch.look({None: 7}, {})
        assert asked == [7, 7], "all are found"
        assert leaves.stdin
        leaves.stdin.close()
    del there[0]
    watch.look({None: 7}, {})
    assert seen[-1] == ({1: os.getpid()}, {0: 0})


@pytest.mark.parametrize(
    ("launcher", "log"),
    [("spawn", "rank0.log"), ("torchrun", "torchrun.log"), ("watch", "launcher.log")],
)
def test_steps_of_an_earlier_attempt_are_not_those_of_this_one(
    run: RunDir, launcher: str, log: str
) -> None:
    """Before the first step, computing counts as work."""
    step = "Epoch: 1, Iter: 10, Loss: 2.5\n"
    (run.ranks / log).write_text(step)
    watch = RanksWatch(
        run, PLAN | SCRIPT | {"launcher": {"value": launcher, "reason": ""}}, range(2), 2
    )
    assert watch._script and not watch._script._trains()
    with (run.ranks / log).open("a") as file:
        file.write("importing\n")
        file.flush()
        assert not watch._script._trains()
        file.write(step)
    assert watch._script._trains()


def test_waiting_for_another_machine_is_not_a_hang_until_that_has_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(run.heartbeat(0), 0).beat("barrier: end of training")
    main = stacks.Thread("MainThread", True, False, False, ())
    seen = [
        SimpleNamespace(rank=0, beat=b, process=SimpleNamespace(gone=False, threads=(main,)))
        for b in read_all(run.heartbeats)
    ]
    found = HangFinding(HANG, None, None, "all ranks wait for each other", {}, {}, 70.0)
    monkeypatch.setattr(
        heartbeat_watchdog.HeartbeatWatchdog, "_overdue", lambda self, beats, pids: beats
    )
    monkeypatch.setattr(heartbeat_watchdog.snapshot, "gather", lambda *_: seen)
    monkeypatch.setattr(heartbeat_watchdog.snapshot, "texts", lambda *_: {})
    monkeypatch.setattr(heartbeat_watchdog.culprit, "find_culprit", lambda *_: found)
    watch = RanksWatch(run, PLAN | {"config": {"hang_timeout": 0.01}}, range(1), 2)
    assert watch.look({0: os.getpid()}, {}) is None
    watch.elsewhere_ended()
    wait_until(lambda: watch.look({0: os.getpid()}, {}), 5)


def test_a_healthy_rank_is_not_a_finding_and_zero_turns_it_off(run: RunDir) -> None:
    for rank in range(2):
        Heartbeat(run.heartbeat(rank), rank).beat("fetch")
    assert RanksWatch(run, PLAN, range(2), 2).look({0: os.getpid(), 1: os.getpid()}, {}) is None
    off = heartbeat_watchdog.HeartbeatWatchdog(
        run, PLAN | {"config": {"hang_timeout": 0}}, range(2)
    )
    assert off.look({0: os.getpid()}) is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock[0] * 1e9))
    monkeypatch.setattr("time.sleep", lambda seconds: clock.append(clock.pop() + seconds))
    return clock


@pytest.fixture
def idle() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def looks(
    watch: heartbeat_watchdog.HeartbeatWatchdog,
    pids: dict[int, int],
    clock: list[float],
    seconds: float,
) -> HangFinding | None:
    """Polls as in the supervisor's loop."""
    end = clock[0] + seconds
    while clock[0] < end:
        clock[0] += 5.0
        if found := watch.look(pids):
            return found
    return None


def test_a_rank_without_a_heartbeat_is_a_hang_after_its_start_limit(
    run: RunDir, clock: list[float], idle: int
) -> None:
    Heartbeat(run.heartbeat(0), 0).beat("rendezvous with the other ranks")
    watch = heartbeat_watchdog.HeartbeatWatchdog(run, PLAN, range(2))
    pids = {0: os.getpid(), 1: idle}
    assert looks(watch, pids, clock, 300) is None
    assert watch.look(pids) is None, "not on the first look"
    found = looks(watch, pids, clock, 60)
    assert (
        found
        and (found.kind, found.rank) == (HANG, 1)
        and "has sent no heartbeat since its start" in found.how
    )
    assert clock[0] - 1000 < 330


def test_a_rank_with_an_earlier_heartbeat_is_never_absent(
    run: RunDir, clock: list[float], capsys: pytest.CaptureFixture[str], idle: int
) -> None:
    """Its heartbeat is unreadable after five minutes: once, or for long."""
    for rank in range(2):
        Heartbeat(run.heartbeat(rank), rank).beat("rendezvous with the other ranks")
    watch, pids = (
        heartbeat_watchdog.HeartbeatWatchdog(run, PLAN, range(2)),
        {0: os.getpid(), 1: idle},
    )
    assert looks(watch, pids, clock, 290) is None
    run.heartbeat(1).rename(run.path / "away")
    assert looks(watch, pids, clock, 50) is None and capsys.readouterr().err == ""
    assert looks(watch, pids, clock, 3000) is None
    assert capsys.readouterr().err.count("unreadable heartbeat") == 1


def test_an_unreadable_rank_of_torchrun_suspends_the_verdict_on_the_others(
    run: RunDir, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        writer = Heartbeat(run.heartbeat(rank), rank)
        for writer.step in (1, 9):
            writer.beat("backward" if rank else "fetch")
    watch, looked = RanksWatch(run, PLAN, range(2), 2), []
    monkeypatch.setattr(
        heartbeat_watchdog.HeartbeatWatchdog, "_examine", lambda self, *facts: looked.append(facts)
    )
    for _ in range(8):
        watch.look({None: os.getpid()}, {})
        clock[0] += 0.5
    looked.clear()
    run.heartbeat(0).rename(run.path / "away")
    watch.look({None: os.getpid()}, {})
    assert looked == []
    (run.path / "away").rename(run.heartbeat(0))
    watch.look({None: os.getpid()}, {})
    assert len(looked) == 1


def test_a_busy_rank_without_a_heartbeat_is_still_starting(
    run: RunDir,
    clock: list[float],
    capsys: pytest.CaptureFixture[str],
    idle: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = procfs.read_process(idle)
    assert real
    monkeypatch.setattr(
        procfs, "read_process", lambda pid: dataclasses.replace(real, cpu_s=0.2 * clock[0])
    )
    watch = heartbeat_watchdog.HeartbeatWatchdog(run, PLAN, range(1))
    assert looks(watch, {0: idle}, clock, 1400) is None
    assert capsys.readouterr().err.count("slow, not stuck") == 1
    assert looks(watch, {0: idle}, clock, 200)


def overdue(run: RunDir, clock: list[float], idle: int) -> heartbeat_watchdog.HeartbeatWatchdog:
    """Rank 0 is in a forward pass; each examination finds a hang."""
    writer = Heartbeat(run.heartbeat(0), 0)
    for writer.step in (1, 9):
        writer.beat("forward")
    watch = heartbeat_watchdog.HeartbeatWatchdog(run, PLAN | {"ranks": 1}, range(1))
    assert watch.look({0: idle}) is None
    return watch


def test_time_without_a_cpu_core_does_not_count(
    run: RunDir,
    clock: list[float],
    idle: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(procfs, "queued", lambda pid: {1: 0.9 * clock[0], 2: 0.0})
    monkeypatch.setattr(stacks, "dump", lambda pids, seconds: {})
    watch, began = overdue(run, clock, idle), clock[0]
    while clock[0] < began + 9 and watch.look({0: idle}) is None:
        clock[0] += 0.25
    assert clock[0] >= began + 9, "three times the limit"
    assert "the machine is overloaded" in capsys.readouterr().err
    while clock[0] < began + 60 and watch.look({0: idle}) is None:
        clock[0] += 0.25
    assert 5 * 3 <= clock[0] - began < 5 * 3 + 3, "bounded"


def test_a_supervisor_without_a_cpu_core_does_not_judge_at_once(
    run: RunDir, clock: list[float], idle: int
) -> None:
    watch, looked = overdue(run, clock, idle), []
    watch._examine = lambda *facts: looked.append(clock[0])  # type: ignore[method-assign,assignment]
    clock[0] += 9
    assert watch.look({0: idle}) is None and looked == []
    clock[0] += 1
    watch.look({0: idle})
    assert looked == [1010.0]


def test_a_rank_that_is_continued_after_a_stop_is_not_a_finding(
    run: RunDir, clock: list[float], idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues between the look that found it stopped and the one that verifies it."""
    for rank in range(2):
        writer = Heartbeat(run.heartbeat(rank), rank)
        for writer.step in (1, 9):
            writer.beat("forward")
    watch = heartbeat_watchdog.HeartbeatWatchdog(run, PLAN, range(2))
    monkeypatch.setattr(
        heartbeat_watchdog.HeartbeatWatchdog, "_look_for_stopped", lambda self, pids, now: 0
    )
    monkeypatch.setattr(stacks, "dump", lambda pids, seconds: {})
    assert watch.look({0: idle, 1: os.getpid()}) is None


def test_a_frozen_job_gets_its_time_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `docker pause` or `scontrol suspend`: the clock advances, but no process runs."""
    clock, looked = [1000.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock[0] * 1e9))
    writer = Heartbeat(run.heartbeat(0), 0)
    writer.step = 1
    writer.beat("fetch")
    writer.step = 9
    writer.beat("forward")
    watch = heartbeat_watchdog.HeartbeatWatchdog(run, PLAN | {"ranks": 1}, range(1))
    monkeypatch.setattr(
        heartbeat_watchdog.HeartbeatWatchdog,
        "_examine",
        lambda self, *facts: looked.append(clock[0]),
    )
    watch.look({0: os.getpid()})
    clock[0] += 500
    watch.look({0: os.getpid()})
    for _ in range(12):
        clock[0] += 0.25
        watch.look({0: os.getpid()})
    assert looked == [], "three seconds after it resumed"
    clock[0] += 0.5
    watch.look({0: os.getpid()})
    assert looked == [clock[0]]
