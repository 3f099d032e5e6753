"""Machines that lose each other's packets, while both reach the one that coordinates."""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK, plan
from tests.unit.test_launch_connections import wires
from training.launcher import coordinator, reach
from training.launcher.local_ranks import free_port
from training.launcher.reach import Reach, to_leave_out


@pytest.fixture
def other() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0), backlog=0) as made:
        yield made


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reach]:
    monkeypatch.setattr(reach, "ANSWER_S", 0.3)
    monkeypatch.setattr(reach, "EVERY_S", 0.0)
    made = Reach()
    yield made
    made.close()


def settled(tests: Reach, waited_s: float) -> list[bool]:
    """The answers of one round of tests."""
    found = [tests.look(waited_s)]

    def look() -> bool:
        found.append(tests.look(waited_s))
        return not tests._tests

    wait_until(look, 10, "the tests")
    return found


def fill(server: socket.socket) -> list[socket.socket]:
    """From now on the kernel drops what asks for a connection."""
    made = []
    for _ in range(4):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(server.getsockname())
        made.append(one)
    time.sleep(0.1)
    return made


def test_a_machine_that_stops_answering_is_reported_once(
    tests: Reach, other: socket.socket
) -> None:
    tests.begin({2: other.getsockname()})
    assert not any(settled(tests, 0.0)) and tests._reached == {2}
    other.accept()[0].close()
    assert not tests.look(0.0) and not tests._tests, "the ranks do not wait"
    kept = fill(other)
    assert sum(settled(tests, 9.0)) == 1 and tests.lost == {2}
    assert not any(settled(tests, 9.0))
    for one in kept:
        one.close()
    tests.begin({2: (LOOPBACK, free_port(LOOPBACK))})
    assert not tests.lost
    assert not any(settled(tests, 9.0)), "a refused connection is an answer"


def test_a_machine_without_a_route_is_reported(
    tests: Reach, other: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests.begin({2: other.getsockname()})
    settled(tests, 0.0)
    # The test needs no rights to change routes: this is the kernel's answer without one.
    monkeypatch.setattr(reach.socket.socket, "connect_ex", lambda *_: errno.ENETUNREACH)
    assert tests.look(9.0) and tests.lost == {2}


def test_a_machine_that_never_answered_is_not_reported(tests: Reach, other: socket.socket) -> None:
    """A firewall."""
    kept = fill(other)
    tests.begin({2: other.getsockname()})
    for _ in range(2):
        assert not any(settled(tests, 9.0)) and not tests.lost
    for one in kept:
        one.close()


@pytest.mark.parametrize(
    ("cuts", "found"),
    [
        ({}, None),
        ({1: set()}, None),
        ({1: {1}}, None),
        ({1: {2}}, (2, [1])),
        ({1: {2}, 2: {1}}, (2, [1])),
        ({2: {1}, 3: {1}}, (1, [2, 3])),
        ({1: {3}, 2: {4}}, (4, [2])),
    ],
)
def test_the_machine_that_reaches_the_fewest_is_left_out(
    cuts: dict[int, set[int]], found: tuple[int, list[int]] | None
) -> None:
    assert to_leave_out(cuts) == found


def test_without_min_ranks_it_is_only_named() -> None:
    with coordinator.Coordinator(plan(0, free_port(LOOPBACK), nodes=3)) as head:
        for node in (1, 2):
            head.met(node, wires()[0], LOOPBACK, "a")
        assert head.machines == dict.fromkeys((1, 2), (LOOPBACK, head.port))
        head.cuts = {2: {1}}
        lost = reach.leave_out(head)
        assert lost and lost.node == 2 and head.missing() == []
        own: Any = {"kind": lost.kind, "rank": None, "victim": False, "node": 2}
        assert head._sure(own)


def test_it_is_missing_unless_it_is_lost_itself() -> None:
    made = plan(0, free_port(LOOPBACK), nodes=3)
    made["elastic"] = {"ranks": 3, "min_ranks": 1}  # type: ignore[typeddict-item]
    with coordinator.Coordinator(made) as head:
        for node in (1, 2):
            head.met(node, wires()[0], LOOPBACK, "a")
        head.cuts = {1: {2}}
        head.wires[2].quiet_s = 5.0
        assert reach.leave_out(head) is None and head.missing() == []
        head.wires[2].quiet_s = 0.0
        lost = reach.leave_out(head)
        assert lost and (lost.node, lost.kind, lost.cause) == (2, "silent", "nccl_network")
        assert head.missing() == [2] and reach.leave_out(head) is None, "once"
        head._ready_again = {2}
        assert head.ready_again == ()


def test_it_is_not_taken_back_before_it_reaches_the_others() -> None:
    here, there = wires()
    with coordinator.Coordinator(plan(0, free_port(LOOPBACK), nodes=3)) as head:
        head.met(1, wires()[0], LOOPBACK, "a")
        head.waiting[2], head.apart[2], head._ready_again = here, {1}, {2}
        head.greet_late()
        assert head.ready_again == ()
        there.sendall(b'{"cut": []}\n')
        wait_until(lambda: head.greet_late() or head.ready_again == (2,))


def test_it_need_not_reach_a_machine_that_is_lost() -> None:
    with coordinator.Coordinator(plan(0, free_port(LOOPBACK), nodes=3)) as head:
        head.apart[2], head._ready_again = {1}, {2}
        assert head.ready_again == (2,)


def test_the_machine_that_was_left_out_reports_that_it_reaches_the_other(
    tests: Reach, other: socket.socket
) -> None:
    kept = fill(other)
    tests.begin_again({1: other.getsockname()})
    assert not any(settled(tests, math.inf)) and tests.lost == {1}
    for one in kept:
        one.close()
    tests.begin_again({1: (LOOPBACK, free_port(LOOPBACK))})
    assert any(settled(tests, math.inf)) and not tests.lost
