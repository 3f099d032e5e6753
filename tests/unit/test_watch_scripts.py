"""Hang detection for user scripts: real processes in known states, real stacks, a short floor."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from training.watchdog import heartbeat_watchdog, script_watchdog
from training.watchdog.hang_report import GPU_WORKS, HANG, UNEVEN, HangFinding, NoFinding
from training.watchdog.probes import procfs
from training.watchdog.probes.sampling import Sample
from training.watchdog.probes.stacks import Stack
from training.watchdog.script_watchdog import ScriptWatch

FLOOR_S = 0.8
LIMIT_S = 75 * FLOOR_S  # for a finding, on a busy machine


def watched(
    pids: dict[int, int],
    seconds: float,
    ended: dict[int, int] | None = None,
    logged: list[str] | None = None,
    *,
    trains: bool = True,
    elsewhere: bool = False,
) -> HangFinding | None:
    """The finding within that time of silence; polled as in the supervisor's loop."""
    warn = (logged if logged is not None else []).append
    watch = ScriptWatch(FLOOR_S, elsewhere=elsewhere, warn=warn, trains=lambda: trains)
    watch.output()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := watch.look(pids, ended):
            return found
        time.sleep(0.05)
    return None


def stuck(pids: dict[int, int], ended: dict[int, int] | None = None) -> HangFinding:
    found = watched(pids, LIMIT_S, ended)
    assert found
    return found


def test_a_lock_while_the_other_rank_waits(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, script):
        found = stuck(pids)
    place = f"{script}:{targets.line_of(script, 'lock.acquire()', 'locks')}"
    assert (found.kind, found.rank, found.where) == ("hang", 0, place)
    assert found.how.startswith(f"is stuck at {place} (locks) (no output for "), found.how
    assert found.waiting == {
        1: f"waits in all_reduce at {script}:{targets.line_of(script, 'all_reduce()', 'waits')} "
        f"(waits)"
    }
    assert set(found.stacks) == {0, 1} and all(
        isinstance(stack, Stack) for stack in found.stacks.values()
    )


def test_looking_does_not_wait_for_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would block the supervisor's loop."""
    began, end = threading.Event(), threading.Event()

    def take(*_: object) -> Sample:
        began.set()
        end.wait()
        return Sample(time.monotonic(), {})

    monkeypatch.setattr(script_watchdog, "take", take)
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        watch = ScriptWatch(FLOOR_S)
        watch.output()
        wait_until(lambda: watch.look(pids) or began.is_set(), LIMIT_S, "a sample")
        for _ in range(3):
            assert watch.look(pids) is None and watch._sampler and watch._sampler.is_alive()
        end.set()
        watch.close()


def test_an_endless_loop(tmp_path: Path) -> None:
    logged: list[str] = []
    with targets.ranks(tmp_path, "waits", "spins") as (pids, script):
        begin, found = time.monotonic(), watched(pids, LIMIT_S, logged=logged)
        assert time.monotonic() - begin > script_watchdog.SPIN_TIMES * FLOOR_S, (
            "long work in one function looks the same"
        )
    assert len(logged) <= 1 and all(
        "in the same Python functions all the time" in text for text in logged
    )
    assert found and (found.kind, found.rank) == ("hang", 1)
    assert found.where and Path(found.where.rpartition(":")[0]) == script
    assert found.how.startswith(f"spins at {found.where} (spins), and holds the GIL")
    assert found.loops and not found.may_end, "it waits for nothing"


@pytest.mark.slow
def test_before_the_first_step_computing_counts_as_work(tmp_path: Path) -> None:
    logged: list[str] = []
    with targets.ranks(tmp_path, "waits", "spins") as (pids, _):
        assert (
            watched(pids, (script_watchdog.SPIN_TIMES + 2.5) * FLOOR_S, logged=logged, trains=False)
            is None
        )
    assert len(logged) <= 1 and all(
        "no step has been printed yet, so this counts as work" in text for text in logged
    )


def test_before_the_first_step_a_lock_is_a_hang(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        found = watched(pids, LIMIT_S, trains=False)
    assert found and (found.kind, found.rank) == ("hang", 0)


@pytest.mark.parametrize(
    "role",
    [
        "works",
        "uploads",
        *(
            pytest.param(role, marks=pytest.mark.slow)
            for role in ("computes_in_c", "writes", "compiles")
        ),
    ],
)
def test_a_rank_that_works_while_the_other_waits_is_not_a_hang(tmp_path: Path, role: str) -> None:
    # An evaluation, a checkpoint, an upload, a compiler: on one rank alone, silent, for many times
    # the floor.
    logged: list[str] = []
    with targets.ranks(tmp_path, role, "waits") as (pids, _):
        assert watched(pids, 5 * FLOOR_S, logged=logged) is None
    assert logged == []


@pytest.mark.slow
def test_a_write_that_never_returns_is_a_hang_after_a_longer_time(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "saves", "waits") as (pids, script):
        begin, found = time.monotonic(), stuck(pids)
        assert time.monotonic() - begin > script_watchdog.ALONE_TIMES * FLOOR_S
    assert (found.kind, found.rank, found.where) == (
        "hang",
        0,
        f"{script}:{targets.line_of(script, 'os.write(', 'saves')}",
    )


@pytest.mark.slow
def test_a_single_rank_that_waits_is_only_a_warning(tmp_path: Path) -> None:
    logged: list[str] = []
    with targets.ranks(tmp_path, "waits") as (pids, _):
        assert watched(pids, 15 * FLOOR_S, logged=logged) is None
    assert len(logged) == 1


def test_all_wait_in_different_places(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "waits", "waits_elsewhere") as (pids, _):
        found = stuck(pids)
    assert (found.kind, found.rank, found.where) == ("uneven", None, None)
    assert found.how.startswith(
        "all ranks wait for each other, in different places: uneven batches, or a branch that not "
        "all of them take"
    )
    assert "(waits)" in found.waiting[0] and "(waits_elsewhere)" in found.waiting[1]


def test_all_wait_in_the_same_place(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "waits", "waits") as (pids, _):
        found = stuck(pids)
    assert (found.kind, found.rank) == ("hang", None)
    assert found.how.startswith(
        "all ranks wait for each other, in the same place: the network or a device"
    )


def test_one_has_finished_and_the_other_waits(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "waits") as (pids, _):
        found = stuck({1: pids[0]}, {0: 0})
    assert (found.kind, found.rank) == ("uneven", 0)
    assert found.how.startswith("has finished (status 0), the others wait for it")
    assert "waits in all_reduce" in found.waiting[1]


def test_a_stopped_rank_is_reported_and_then_found(tmp_path: Path) -> None:
    logged: list[str] = []
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        targets.stopped(pids[0])
        found = watched(pids, LIMIT_S, logged=logged)
    assert found and (found.kind, found.rank) == ("stopped", 0)
    assert (
        found.how == f"is stopped (SIGSTOP; resume: kill -CONT {pids[0]})"
        and found.since_s >= heartbeat_watchdog.STOPPED_S
    )
    stopped = f"rank 0 (pid {pids[0]}) is stopped by SIGSTOP; resume: kill -CONT {pids[0]}"
    assert logged == [f"{stopped}; the run is ended after {heartbeat_watchdog.STOPPED_S:g} s"]


def test_ranks_that_are_all_stopped_are_not_a_hang(tmp_path: Path) -> None:
    """With ranks on other machines, it is not known that all are."""
    logged: list[str] = []
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        for pid in pids.values():
            targets.stopped(pid)
        assert watched(pids, 4 * FLOOR_S, logged=logged) is None and logged == []
        assert watched(pids, 4 * FLOOR_S, logged=logged, elsewhere=True) is None
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
    shown = "rank {0} (pid {1}) is stopped by SIGSTOP; resume: kill -CONT {1}"
    assert logged == [shown.format(*rank) for rank in pids.items()]


@pytest.mark.parametrize("role", [pytest.param("sleeps", marks=pytest.mark.slow), "spins"])
def test_a_single_rank_may_wait_indefinitely(tmp_path: Path, role: str) -> None:
    # A server, a poll, a timer: indistinguishable from a deadlock. Reported once, and only where
    # the rank is idle.
    logged: list[str] = []
    with targets.ranks(tmp_path, role) as (pids, _):
        assert watched(pids, 7 * FLOOR_S, logged=logged) is None
    assert len(logged) == (0 if role == "spins" else 1)
    assert all("no rank waits for another, none works: rank 0 is at " in text for text in logged)


def test_a_loader_whose_worker_is_stuck(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "loads", "waits") as (pids, script):
        found = stuck(pids)
        (worker,) = procfs.workers(pids[0])
        place = f"{script}:{targets.line_of(script, 'lock.acquire()', 'stuck_in_the_dataset')}"
        assert (found.kind, found.rank, found.where) == ("hang", 0, place)
        how = (
            f"waits for its data-loader worker (pid {worker}), which is stuck at {place} "
            f"(stuck_in_the_dataset)"
        )
        assert found.how.startswith(how)
        # A single rank, or all of them: there is no other reason to wait for an idle worker, but it
        # takes longer to be sure.
        begin = time.monotonic()
        alone = stuck({0: pids[0]})
        assert (alone.rank, alone.where) == (0, place) and alone.how.startswith(how)
        assert time.monotonic() - begin > 3 * FLOOR_S


def test_output_restarts_the_silence(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        watch, end = ScriptWatch(FLOOR_S), time.monotonic() + 3 * FLOOR_S
        while time.monotonic() < end:
            watch.output()
            assert watch.look(pids) is None
            time.sleep(0.05)


def test_a_rank_that_continues_during_the_silence(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        targets.stopped(pids[0])
        watch, begin = ScriptWatch(60.0, warn=[].append), time.monotonic()
        while time.monotonic() < begin + 1.0:
            assert watch.look(pids) is None
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGCONT)
        wait_until(
            lambda: watch.look(pids) is None and not watch._stopped,
            20,
            "it no longer counts as stopped",
        )


def test_slow_looks_count_too() -> None:
    """On a busy machine a look takes longer than the window for three of them."""
    samples = [Sample(at, {}) for at in (1.0, 1.5, 2.0, 2.5)]
    assert script_watchdog.last(samples, 0.6) == samples[1:]
    assert (
        script_watchdog.last(samples, 1.2) == samples[1:]
        and script_watchdog.last(samples, 1.5) == samples
    )
    assert script_watchdog.last(samples, 5.0) == [] and script_watchdog.last(samples[:2], 0.6) == []


@pytest.mark.parametrize(
    ("facts", "alone", "certain"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"loops": True}, True, True),
        ({"may_end": True}, True, False),  # it may wait for the rank whose GPU computes
        ({"kind": UNEVEN}, True, False),  # it has finished, and the other one evaluates
        ({"rank": None}, True, False),
    ],
)
def test_a_stuck_rank_beside_gpus_without_pending_collectives(
    facts: dict[str, Any], alone: bool, certain: bool
) -> None:
    """Collectives in CUDA graphs are not recorded."""
    waiting = {1: "waits in the GPU at train.py:7 (step)"}
    stuck = HangFinding(HANG, 0, "train.py:9", "is stuck", waiting, {}, 9.0)
    found = dataclasses.replace(stuck, **facts)
    result = ScriptWatch(1.0, pending=lambda rank: False)._doubted(found, alone, [])
    if certain:
        assert result == dataclasses.replace(found, may_end=True)
    else:
        assert isinstance(result, NoFinding) and result.code == GPU_WORKS


def test_gpus_that_compute_for_long_are_a_warning() -> None:
    logged: list[str] = []
    watch = ScriptWatch(3.0, warn=logged.append)
    watch._verdict = (watch._samples, NoFinding(GPU_WORKS, "the GPU computes"))
    for limits, warnings in ((9, 0), (11, 1), (12, 1)):
        assert watch._result(3.0 * limits, 3.0, stopped=False) is None
        assert len(logged) == warnings


def test_zero_turns_it_off(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        watch = ScriptWatch(0)
        for _ in range(20):
            assert watch.look(pids) is None
            time.sleep(0.05)
        assert watch._sampler is None


def test_a_rank_that_exits_during_the_silence(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        os.kill(pids[0], signal.SIGKILL)
        assert watched(pids, 3 * FLOOR_S) is None


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_patience_follows_the_silences_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(script_watchdog, "time", clock)
    watch = ScriptWatch(3.0)
    clock.now += 40  # imports
    watch.output()
    assert watch.patience_s() == 3.0, "the start does not count"
    for gap in [0.0001] * 50 + [2.0] * 5:
        clock.now += gap
        watch.output()
    assert watch.patience_s() == pytest.approx(10.0), (
        "five times the usual gap; lines of one burst count once"
    )
    for gap in [0.1] * 200:
        clock.now += gap
        watch.output()
    assert watch.patience_s() == pytest.approx(10.0), "1 of 40 is usual"
    for gap in [0.1] * 495:
        clock.now += gap
        watch.output()
    assert watch.patience_s() == 3.0, "old gaps are forgotten"


def test_input_is_looked_for_with_each_sample_and_before_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in each look: that reads a file for each of the hundreds of threads of a rank."""
    clock, asked, reads = Clock(), list[int](), [False]
    found = HangFinding("hang", 0, "main.py:1", "is stuck", {}, {}, 9.0)
    monkeypatch.setattr(script_watchdog, "time", clock)
    monkeypatch.setattr(ScriptWatch, "_examine", lambda *_: None)

    def reads_input(pid: int) -> bool:
        asked.append(pid)
        return reads[0]

    monkeypatch.setattr(script_watchdog.system_calls, "reads_input", reads_input)
    watch = ScriptWatch(60.0, warn=[].append)
    for _ in range(4 * 60):
        clock.now += 0.25
        assert watch.look({0: os.getpid()}) is None
        watch.close()
    assert 5 <= len(asked) <= 7, "from the half of the patience on"
    monkeypatch.setattr(watch, "_result", lambda *_: found)
    assert watch.look({0: os.getpid()}) is found
    reads[0] = True
    assert watch.look({0: os.getpid()}) is None and watch._quiet_since == clock.now


def test_a_machine_that_was_suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(script_watchdog, "time", clock)
    watch = ScriptWatch(3.0)
    clock.now += 1000  # look() was not called: this process was stopped
    assert watch.look({0: os.getpid()}) is None
    assert watch._sampler is None and watch._quiet_since == clock.now
