"""A rank that a debugger holds is reported, and the run is not ended; nor are ranks that a user has
stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir
from training.watchdog.heartbeat_watchdog import STOPPED_S, HeartbeatWatchdog
from training.watchdog.probes import procfs
from training.watchdog.script_watchdog import ScriptWatch

PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 2}
FLOOR_S = 0.4
DETACH, SEIZE, INTERRUPT = 17, 0x4206, 0x4207  # requests of ptrace
ENDS = "; the run waits until it is continued there, or the debugger ends"


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """By this process."""
    ptrace = ctypes.CDLL(None).ptrace
    if ptrace(SEIZE, pid, None, None):
        pytest.skip("ptrace is not permitted here")
    ptrace(INTERRUPT, pid, None, None)
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        ptrace(DETACH, pid, None, None)


def test_a_rank_of_a_script(tmp_path: Path) -> None:
    logged: list[str] = []
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        watch = ScriptWatch(FLOOR_S, warn=logged.append)
        watch.output()
        with held(pids[0]):
            end = time.monotonic() + 3 * STOPPED_S
            while time.monotonic() < end:
                assert watch.look(pids) is None
                time.sleep(0.05)
            assert procfs.tracer(pids[0]) == os.getpid()
        wait_until(lambda: watch.look(pids) is None and not watch._stopped, what="it continues")
    by = f"{procfs.name(os.getpid())} (pid {os.getpid()})"
    assert logged == [f"rank 0 (pid {pids[0]}) is held by {by}{ENDS}"]


def test_a_rank_of_duets_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others, which wait for it, are overdue only after it has continued."""
    clock, looked, state = [1000.0], [], ["t"]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock[0] * 1e9))
    run = RunDir(tmp_path)
    run.create()
    for rank in range(2):
        writer = Heartbeat(run.heartbeat(rank), rank)
        for writer.step in (1, 9):
            writer.beat("forward")
    pids, read = {0: os.getppid(), 1: os.getpid()}, procfs.read_process
    monkeypatch.setattr(
        procfs,
        "read_process",
        lambda pid: (one := read(pid)) and replace(one, state=state[0] if pid == pids[1] else "S"),
    )
    monkeypatch.setattr(procfs, "tracer", lambda pid: 0)
    monkeypatch.setattr(HeartbeatWatchdog, "_examine", lambda self, *facts: looked.append(clock[0]))
    watch = HeartbeatWatchdog(run, PLAN, range(2))
    for _ in range(400):
        clock[0] += 0.25
        watch.look(pids)
    assert looked == []
    text = f"rank 1 (pid {pids[1]}) is held by a debugger{ENDS}"
    assert capsys.readouterr().err.count(text) == 1
    state[0], detached = "S", clock[0]
    while not looked and clock[0] < detached + 60:
        clock[0] += 0.25
        watch.look(pids)
    assert looked and looked[0] > detached + PLAN["config"]["hang_timeout"]


@pytest.mark.parametrize(
    ("state", "nnodes", "reported", "ended"), [("T", 1, 0, 0), ("T", 2, 2, 0), ("S", 1, 1, 1)]
)
def test_ranks_of_duets_training_that_are_all_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    nnodes: int,
    reported: int,
    ended: int,
) -> None:
    """`state`: of rank 1. On several machines, ranks of another one may run."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock[0] * 1e9))
    monkeypatch.setattr(HeartbeatWatchdog, "_examine", lambda self, *facts: None)
    run = RunDir(tmp_path)
    run.create()
    for rank in range(2):
        Heartbeat(run.heartbeat(rank), rank).beat("forward")
    pids, read = {0: os.getpid(), 1: os.getppid()}, procfs.read_process
    states = {pids[0]: "T", pids[1]: state}
    monkeypatch.setattr(
        procfs,
        "read_process",
        lambda pid: (one := read(pid)) and replace(one, state=states.get(pid, one.state)),
    )
    watch = HeartbeatWatchdog(run, PLAN | {"ranks": 2 * nnodes}, range(2))
    for _ in range(20):
        clock[0] += 0.25
        watch.look(pids)
    logged = capsys.readouterr().err
    assert logged.count("by SIGSTOP") == reported
    assert logged.count("the run is ended after 3 s") == ended
    assert run.events.exists() == bool(reported)
