"""Ranks of a script that save at SIGTERM after the failure of another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.node_plans import LOOPBACK, plan
from tests.unit.test_launch_connections import Quiet, wires
from tests.unit.test_launch_late_exits import Start
from tests.unit.test_launch_late_exits import start as start  # noqa: PLC0414 – a fixture
from training.core.errors import Exit
from training.core.rundir import RunDir
from training.host.platform_env import SHUTDOWN
from training.launcher import coordinator, failure_report, leaving_ranks, peer_link, timeouts
from training.launcher.json_socket import JsonSocket
from training.launcher.local_ranks import free_port
from training.launcher.outcome import Outcome
from training.launcher.peer_messages import PeerMessages
from training.watchdog import held
from training.watchdog.probes import flight_recorder, stacks
from training.watchdog.probes.stacks import Frame, Stack, Thread

# Rank 1 fails once rank 0 is ready.
FAILS = """
if rank:
    while not (folder / "ready").exists():
        time.sleep(0.01)
    sys.exit(7)
%s
(folder / "ready").touch()
while True:
    time.sleep(0.01)
"""
SAVES = """
def save(number, frame):
    (folder / "saving").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / "saved").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
"""
Go = Callable[..., Outcome]


@pytest.fixture
def go(run: RunDir, start: Start, monkeypatch: pytest.MonkeyPatch) -> Go:
    """`saving` is called once the handler of rank 0 runs and its stack was looked at twice."""
    monkeypatch.setattr(leaving_ranks, "LOOK_S", 0.0)
    monkeypatch.setattr(leaving_ranks, "LOOK_TIMES", 0)

    def make(
        code: str,
        waits: bool = False,
        saving: Callable[[], None] = lambda: None,
    ) -> Outcome:
        looks = list[int]()

        def look(folder: Path, ranks: Mapping[int, int]) -> set[int]:
            looks.extend(ranks)
            return {0} if waits else set()

        def each_pass() -> None:
            if len(looks) > 1 and (run.path / "saving").exists():
                saving()

        monkeypatch.setattr(held, "in_collectives", look)
        tried = start(FAILS % code)
        tried.each_pass = each_pass
        return tried.go()

    return make


def test_a_rank_that_handles_sigterm_may_save(
    run: RunDir, go: Go, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = go(SAVES, saving=(run.path / "go").touch)
    assert (run.path / "saved").exists()
    assert outcome.ended == [(1, 7), (0, 0)] and outcome.guilty == (1, 7)
    assert failure_report.exit_code(outcome) == Exit.TRAINING
    shown = capfd.readouterr().err
    assert shown.index("stopping the others") < shown.index(
        "SIGTERM sent to rank 0 after the failure of rank 1: waiting up to 30 s"
    )


@pytest.mark.parametrize(
    ("code", "waits", "limit"),
    [("", False, ""), (SAVES, True, ""), (SAVES, False, "0"), (SAVES, False, "1")],
    ids=["no_handler", "in_a_collective", "no_time", "limit"],
)
def test_others_are_killed(
    run: RunDir, go: Go, monkeypatch: pytest.MonkeyPatch, code: str, waits: bool, limit: str
) -> None:
    if limit:
        monkeypatch.setenv(SHUTDOWN, limit)
    began = time.monotonic()
    outcome = go(code, waits)
    assert outcome.ended == [(1, 7), (0, -signal.SIGKILL)] and outcome.guilty == (1, 7)
    assert time.monotonic() - began < timeouts.SHUTDOWN_S
    assert not (run.path / "saved").exists()


def test_a_stop_signal_ends_the_wait(run: RunDir, handlers: None, go: Go) -> None:
    began = time.monotonic()
    asked: list[int] = []

    def ask_once() -> None:
        if not asked:
            asked.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = go(SAVES, saving=ask_once)
    assert outcome.ended == [(1, 7), (0, -signal.SIGKILL)]
    assert (outcome.guilty, outcome.killed, outcome.late_stop) == ((1, 7), False, signal.SIGTERM)
    assert time.monotonic() - began < timeouts.SHUTDOWN_S
    assert failure_report.exit_code(outcome) == Exit.TRAINING


COLLECTIVE = Frame("/lib/torch/distributed/distributed_c10d.py", 9, "all_reduce")
BACKWARD = Frame("/lib/torch/autograd/graph.py", 9, "_engine_run_backward")
SYNCS = Frame("/lib/torch/cuda/__init__.py", 9, "synchronize")
OWN = Frame("/home/u/train.py", 3, "save")


@pytest.mark.parametrize(
    ("inner", "pending", "waits"),
    [
        (COLLECTIVE, None, True),
        (BACKWARD, True, True),
        (BACKWARD, False, False),
        (SYNCS, True, True),
        (SYNCS, None, False),
        (OWN, True, False),  # its handler saves, while a GPU waits for the lost rank
        (None, True, True),  # no py-spy
        (None, None, False),
    ],
)
def test_which_ranks_reach_no_handler(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    inner: Frame | None,
    pending: bool | None,
    waits: bool,
) -> None:
    main = Thread("MainThread", True, False, False, (inner, OWN)) if inner else None
    stack = Stack(1, "py-spy", (main,)) if main else "no py-spy"
    monkeypatch.setattr(stacks, "dump", lambda pids: dict.fromkeys(pids, stack))
    monkeypatch.setattr(flight_recorder, "pending", lambda *_: pending)
    assert held.in_collectives(run.ranks, {1: os.getpid()}) == ({1} if waits else set())


# ── several machines


def test_the_other_machines_hear_of_ranks_that_save(run: RunDir, start: Start) -> None:
    line = Quiet()
    tried = start(FAILS % SAVES)
    tried.state.others.line = line
    tried.each_pass = lambda: (run.path / "saving").exists() and (run.path / "go").touch()
    tried.go()
    heard = JsonSocket(line.other).arrived()
    assert heard[:2] == [{"failed": {"rank": 1, "status": 7}}, {"leaving": True}]


def test_the_record_of_the_machine_whose_ranks_save_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a third machine, which is connected to node 0 alone."""
    monkeypatch.setattr(peer_link, "SETTLE_S", 1.0)
    monkeypatch.setattr(peer_link, "PING_S", 0.05)
    known: Any = {"rank": 1, "victim": False, "kind": "error", "node": 1}
    victim: Any = {"rank": None, "victim": True, "kind": "died"}
    (far, near), (other, third) = wires(), wires()
    there, asked = JsonSocket(near), JsonSocket(third)
    with coordinator.Coordinator(plan(0, free_port(LOOPBACK), nodes=3)) as head:
        head.met(1, far, LOOPBACK, "a")
        head.met(2, other, LOOPBACK, "b")

        def saves() -> None:
            for _ in range(10):
                there.send({"leaving": True})
                time.sleep(0.2)
            there.send({"record": known})

        thread = threading.Thread(target=saves)
        thread.start()
        assert head.settle(victim) == known
        thread.join()
    heard = asked.arrived()
    assert heard[0] == {"leaving": True} and heard[-1] == {"record": known}


def test_ranks_that_save_elsewhere_do_not_count_as_a_failure() -> None:
    line: Any = Quiet()
    JsonSocket(line.other).send({"leaving": True})
    state: Any = SimpleNamespace(link=line, outcome=Outcome(ours=False))
    PeerMessages(state, None, None, None)._read(0, 0)  # type: ignore[arg-type]
    assert JsonSocket(line.other).arrived() == [], "only node 0 passes it on"


@pytest.mark.parametrize("step", ["settle", "decide", "go"])
def test_a_machine_that_waits_for_one_whose_ranks_save_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(peer_link, "PING_S", 0.05)
    victim: Any = {"rank": None, "victim": True, "kind": "died", "node": 1}
    line, head = Quiet(), coordinator.Coordinator(plan(0, free_port(LOOPBACK)))
    far, near = wires()
    head.met(1, far, LOOPBACK, "a")
    there = JsonSocket(near if step == "go" else line.other)
    there.quiet_s = 9.0
    pinged: list[bool] = []

    def saves() -> None:
        end = time.monotonic() + 5
        while there.quiet_s and time.monotonic() < end:
            there.arrived()
            time.sleep(0.01)
        pinged.append(not there.quiet_s)
        there.send({"record": {}, "again": {}, "ready": True})

    thread = threading.Thread(target=saves)
    thread.start()
    with head:
        if step == "settle":
            line.settle(victim)
        elif step == "decide":
            line.decide(None)
        else:
            team = head.go()
            assert team
            team.close()
    thread.join()
    assert pinged == [True]
