"""Ranks that have exited during their work, and those that wait for others."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.unit.test_launch_attempt import PLAN, RANK
from training.core.errors import Exit
from training.core.heartbeat import FINISHED, Heartbeat, read_all
from training.core.rundir import RunDir
from training.launcher import timeouts
from training.watchdog.hang_report import HANG
from training.watchdog.start import RanksWatch


def test_a_rank_of_torchrun_that_exited_during_its_work_is_a_hang(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GONE_S", 0.0)
    Heartbeat(run.heartbeat(1), 1).beat("backward")
    gone = timeouts.Gone(0.0)
    for last in ("finished", "forward"):
        assert gone.look(read_all(run.heartbeats)) is None
        subprocess.run([sys.executable, "-c", RANK + f"beat({last!r})", str(run.path)], check=True)
    assert gone.look(read_all(run.heartbeats)) is None, "not on the first look"
    found = gone.look(read_all(run.heartbeats))
    assert found and (found.kind, found.rank, found.waiting) == (HANG, 0, {1: "step 0: backward"})
    assert found.phase == "step 0: forward" and "exited" in found.how
    patient = timeouts.Gone(3600.0)
    assert [patient.look(read_all(run.heartbeats)) for _ in range(2)] == [None, None], (
        "not before the limit of a hang"
    )


def test_a_rank_that_finishes_during_the_check_is_not_a_hang(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GONE_S", 0.0)
    gone = timeouts.Gone(0.0)
    subprocess.run(
        [sys.executable, "-c", RANK + "beat('closing trackers')", str(run.path)], check=True
    )
    assert gone.look(read_all(run.heartbeats)) is None
    subprocess.run([sys.executable, "-c", RANK + "beat('finished')", str(run.path)], check=True)
    assert gone.look(read_all(run.heartbeats)) is None


@pytest.mark.parametrize("asked", [Exit.INTERRUPTED, Exit.PREEMPTED])
@pytest.mark.parametrize(
    ("phase", "silent_s"),
    [("barrier: end of training", 6), ("summary", 601), ("checkpoint", 601)],
)
def test_how_long_the_last_rank_may_be_silent_after_a_stop_request(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, asked: Exit, phase: str, silent_s: int
) -> None:
    """The summary of many steps takes as long as a checkpoint may."""
    limit_s = 61 if asked == Exit.PREEMPTED and silent_s == 6 else silent_s
    monkeypatch.setattr(timeouts, "NOTICE_S", 60.0)
    for rank, name in enumerate((phase, FINISHED)):
        writer = Heartbeat(run.heartbeat(rank), rank)
        for writer.step in range(1, 9):
            writer.beat("fetch")
        writer.beat(name)
    beats = read_all(run.heartbeats)
    watch = RanksWatch(run, PLAN | {"config": {"hang_timeout": 60}}, range(2), 2)
    now = max(beat.monotonic_ns for beat in beats)
    for later_s, expected in ((limit_s - 2, False), (limit_s, True)):
        monkeypatch.setattr("time.monotonic_ns", lambda s=later_s: now + s * 10**9)
        assert timeouts.silent(beats, asked, watch) is expected


@pytest.mark.parametrize(
    ("phase", "step", "still"),
    [
        ("backward", 9, True),
        ("backward", 1, False),
        ("forward", 9, False),
        ("checkpoint", 9, False),
        ("evaluation", 9, False),
    ],
)
def test_only_ranks_that_wait_for_others_count_as_waiting(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, phase: str, step: int, still: bool
) -> None:
    """Decides when a frozen supervisor of another machine counts as lost: a rank that evaluates is
    slow by itself."""
    writer = Heartbeat(run.heartbeat(0), 0)
    for writer.step in range(1, step + 1):
        writer.beat("fetch")
    writer.beat(phase)
    (beat,) = read_all(run.heartbeats)
    later = beat.monotonic_ns + 9 * 10**9
    monkeypatch.setattr("time.monotonic_ns", lambda: later)
    watch = RanksWatch(run, PLAN, range(1), 1)
    assert timeouts.still_s([beat], watch) == (9.0 if still else 0.0)
    assert timeouts.still_s([], watch) == 0.0


@pytest.mark.parametrize(
    ("guilty", "seconds"),
    [
        ((1, -signal.SIGKILL), 1.0),
        ((1, -signal.SIGSEGV), 1.0),
        ((1, -signal.SIGABRT), 3.0),
        ((1, 1), 3.0),
        ((None, 0), 3.0),
    ],
)
def test_the_grace_of_the_other_ranks_is_short_where_they_can_explain_nothing(
    guilty: tuple[int | None, int], seconds: float
) -> None:
    assert timeouts.grace_s(guilty) == seconds


@pytest.mark.parametrize(
    ("phase", "step", "asked", "seconds"),
    [
        ("evaluation", 9, Exit.PREEMPTED, 300.0),  # the whole budget
        ("first evaluation", 9, Exit.PREEMPTED, 300.0),
        ("forward", 1, Exit.PREEMPTED, 300.0),  # the first step
        ("forward", 9, Exit.PREEMPTED, 30.0),  # less than the scheduler waits
        ("evaluation", 9, Exit.INTERRUPTED, 5.0),
        ("forward", 1, Exit.INTERRUPTED, 5.0),
    ],
)
def test_slow_phases_keep_their_budget_after_a_request_of_the_scheduler(
    run: RunDir, phase: str, step: int, asked: Exit, seconds: float
) -> None:
    writer = Heartbeat(run.heartbeat(0), 0)
    for writer.step in range(1, step + 1):
        writer.beat("fetch")
    writer.beat(phase)
    (beat,) = read_all(run.heartbeats)
    assert timeouts.patience_s(beat, asked, RanksWatch(run, PLAN, range(1), 1)) == seconds
