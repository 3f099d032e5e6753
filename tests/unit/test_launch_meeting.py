"""The talk of several machines' supervisors: lines over a socket, what must be the same, and strangers on the port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from training.errors import Exit, UserError
from training.launch import meeting
from training.launch.place import NODE, Place
from training.launch.team import QUIET_PORTS, free_port, listen
from training.launch.wire import LIMIT, Broken, Wire

LOOPBACK = "127.0.0.1"


def plan(node: int, port: int, nodes: int = 2, **config: Any) -> dict[str, Any]:
    place = Place(NODE, "flags", "", nnodes=nodes, node_rank=node, master_addr=LOOPBACK, master_port=port)
    return {
        "place": place.record(),
        "config": {"seed": 1, "depth": 2, "master_port": port, "node_rank": node, "run_name": ""} | config,
        "ranks": 2 * nodes,
        "local_ranks": 2,
        "launcher": {"value": "spawn"},
        "master_port": port,
        "torch": "2.13.0",
        "run_name": "a_run",
        "launch": "abc",
    }


def wires() -> tuple[Wire, socket.socket]:
    ours, theirs = socket.socketpair()
    return Wire(ours), theirs


def test_messages_arrive_whole_however_they_are_cut() -> None:
    wire, other = wires()
    other.sendall(b'{"a": 1}\n{"b"')
    assert wire.receive(1) == {"a": 1}
    assert wire.arrived() == []
    other.sendall(b': 2}\n{"c": 3}\n')
    assert wire.arrived() == [{"b": 2}, {"c": 3}]
    other.sendall(b'{"last": 1}\n')
    other.close()
    assert wire.arrived() == [{"last": 1}], "what was said before the end counts"
    with pytest.raises(Broken, match="closed by the other side"):
        wire.arrived()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"1" * (LIMIT + 100_000)])
def test_noise_is_no_message(noise: bytes) -> None:
    wire, other = wires()
    threading.Thread(target=lambda: other.sendall(noise), daemon=True).start()
    with pytest.raises(Broken):
        wire.receive(5)


def test_what_belongs_to_one_machine_may_differ() -> None:
    head, other = plan(0, 1), plan(1, 2, node_rank=1)
    assert meeting.differences(meeting.facts(other), meeting.facts(head), 1) == []
    changed = plan(1, 1, seed=2, depth=3) | {"torch": "2.12", "local_ranks": 4}
    assert meeting.differences(meeting.facts(changed), meeting.facts(head), 1) == [
        "depth is 3 on node 1, but 2 on node 0",
        "ranks per machine is 4 on node 1, but 2 on node 0",
        "seed is 2 on node 1, but 1 on node 0",
        "torch is '2.12' on node 1, but '2.13.0' on node 0",
    ]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except UserError as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def test_two_machines_meet_and_go() -> None:
    port = free_port(LOOPBACK)

    def member() -> Any:
        own = plan(1, port)
        name, own["launch"] = meeting.ask(own, 10)
        with meeting.Member(own) as line:
            line.gather(10)
            return name, line.go()

    thread, out = in_thread(member)
    with meeting.Head(plan(0, port)) as line:
        line.gather(10)
        team = line.go()
        assert (list(team.ranks), team.world_size, team.port) == ([0, 1], 4, port) and team.store is not None
    thread.join(10)
    name, theirs = out[0]
    assert name == "a_run" and (list(theirs.ranks), theirs.port, theirs.store) == ([2, 3], port, None)


def test_another_plan_is_refused_and_the_wait_goes_on() -> None:
    port = free_port(LOOPBACK)
    with meeting.Head(plan(0, port)) as line:
        thread, out = in_thread(lambda: meeting.ask(plan(1, port, seed=7), 5))
        with pytest.raises(UserError) as missing:
            line.gather(1.5)
        thread.join(5)
    assert "seed is 7 on node 1, but 1 on node 0" in str(out[0]) and out[0].code == Exit.CONFIG
    assert missing.value.code == Exit.RESOURCES and "node 1 of 2 did not come" in str(missing.value)


@pytest.mark.parametrize("node", [0, 2, 9, "1", None])
def test_a_node_that_is_not_awaited_is_refused(node: object) -> None:
    port = free_port(LOOPBACK)
    with meeting.Head(plan(0, port)) as line:
        assert any("are awaited here" in text for text in line._refusal({"duet": meeting.PROTOCOL, "node": node}, node))
        assert line._refusal({"duet": 0}, 1) == ["it speaks another version of the launcher"]
        assert line._refusal({"duet": meeting.PROTOCOL, "want": "join", "launch": "old"}, 1) == ["it belongs to another start"]


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "", 7, None])
def test_a_run_name_from_the_network_makes_no_path(name: object) -> None:
    port = free_port(LOOPBACK)
    with meeting.Head(plan(0, port) | {"run_name": name}) as line:
        thread, out = in_thread(lambda: meeting.ask(plan(1, port), 5))
        with pytest.raises(UserError):
            line.gather(1.0)
        thread.join(5)
    assert isinstance(out[0], UserError)


def test_a_stranger_on_the_port_does_not_answer() -> None:
    port = free_port(LOOPBACK)
    with listen(LOOPBACK, port, 5), pytest.raises(UserError) as caught:
        meeting.ask(plan(1, port), 0.5)
    assert "something else listens there" in str(caught.value)


def test_ports() -> None:
    assert free_port(LOOPBACK) in QUIET_PORTS
    with listen(LOOPBACK, 0, 1) as taken:
        wanted = taken.getsockname()[1]
        with listen(LOOPBACK, wanted, 1) as other:
            assert wanted < other.getsockname()[1] < wanted + 10
