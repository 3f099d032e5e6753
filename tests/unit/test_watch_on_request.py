"""Stacks that a rank writes itself where none can be read from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from training.core.heartbeat import Heartbeat, read_all
from training.core.rundir import RunDir, read_records
from training.watchdog import start
from training.watchdog.hang_report import STOPPED, HangFinding
from training.watchdog.heartbeat_watchdog import HeartbeatWatchdog
from training.watchdog.probes import on_request, procfs, stacks
from training.watchdog.probes.stacks import Stack

REGISTERS = """
import faulthandler, signal, sys, threading
file = open(sys.argv[1], "w")
faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
"""
OPENS, CATCHES = (
    REGISTERS.rpartition("faulthandler")[0],
    "\nimport signal, threading\nsignal.signal(signal.SIGUSR2, lambda *_: None)\n",
)
STUCK = """
def stuck():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()
stuck()
"""
PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 1}
Started = Callable[[str, int], int]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


@pytest.fixture
def started(run: RunDir) -> Iterator[Started]:
    """Starts a rank that is stuck in a lock; returns its PID."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(code: str, rank: int = 0) -> int:
        command = [sys.executable, "-c", code + STUCK, str(run.ranks / f"rank{rank}.stacks")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        out = processes[-1].stdout
        assert out and out.readline() == b"ready\n"
        return processes[-1].pid

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def main_function(stack: Stack | str) -> str:
    assert isinstance(stack, Stack) and stack.main
    return stack.main.frames[0].name


def test_a_rank_that_has_registered_the_signal_writes_its_stack(
    run: RunDir, started: Started
) -> None:
    pid = started(REGISTERS, 0)
    for _ in range(2):
        (found,) = on_request.ask(run.ranks, {0: pid}).values()
        assert (found.pid, found.source, main_function(found)) == (pid, "faulthandler", "stuck")


def test_no_other_process_gets_the_signal(run: RunDir, started: Started) -> None:
    """It would end a process without a handler; a script may have its own one, and no file."""
    (run.ranks / "rank2.stacks").touch()
    stopped = started(REGISTERS, 3)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: (one := procfs.read_process(stopped)) and one.state == "T")
    pids = {0: started(OPENS, 0), 1: started(CATCHES, 1), 2: started(CATCHES, 2), 3: stopped}
    assert on_request.ask(run.ranks, pids | {4: 2**22 + 1}) == {}
    assert all(procfs.lives(pid) for pid in pids.values())
    for pid in pids.values():
        pending = procfs.read_text(f"/proc/{pid}/status").partition("ShdPnd:")[2].split()[0]
        assert not int(pending, 16)


def test_a_handler_of_the_script_itself_costs_only_a_moment(run: RunDir, started: Started) -> None:
    assert on_request.ask(run.ranks, {0: started(REGISTERS + CATCHES, 0)}) == {}


def test_the_verdict_on_a_training_names_the_place_although_ptrace_is_forbidden(
    run: RunDir, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(REGISTERS, 0)
    monkeypatch.setattr(stacks, "dump", lambda pids, seconds: dict.fromkeys(pids, "forbidden"))
    writer = Heartbeat(run.heartbeat(0), 0, pid)
    for writer.step in (1, 9):
        writer.beat("forward")
    watch, beats = HeartbeatWatchdog(run, PLAN, range(1)), read_all(run.heartbeats)
    found = watch._examine(beats, {0: pid}, beats, None)
    assert found and found.rank == 0 and found.folder
    assert found.where and found.where.startswith("<string>:")
    assert "(stuck)" in (Path(found.folder) / "rank0.txt").read_text()
    (verdict,) = read_records(run.events)
    assert verdict["where"] == found.where


def test_a_look_without_consequences_sends_no_signal(
    run: RunDir, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(REGISTERS, 0)
    monkeypatch.setattr(stacks, "dump", lambda pids, seconds: dict.fromkeys(pids, "forbidden"))
    Heartbeat(run.heartbeat(0), 0, pid).beat("forward")
    watch, beats = HeartbeatWatchdog(run, PLAN, range(1), acts=False), read_all(run.heartbeats)
    assert watch._examine(beats, {0: pid}, beats, None)
    assert (run.ranks / "rank0.stacks").read_text() == ""


def test_the_places_of_the_ranks_of_a_script(run: RunDir, started: Started) -> None:
    pid = started(REGISTERS, 0)
    taken: dict[int, Stack | str] = {0: "forbidden", 1: "stopped"}
    found = HangFinding(STOPPED, 1, None, "is stopped", {0: "has no stack"}, taken, 4.0)
    complete = start._complete(found, run, {0: pid, 1: pid})
    assert main_function(complete.stacks[0]) == "stuck" and "(stuck)" in complete.waiting[0]
    assert complete.stacks[1] == "stopped"
