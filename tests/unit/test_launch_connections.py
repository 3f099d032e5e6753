"""Connections of the supervisors of several machines: messages, and machines that are silent or
lost."""

from __future__ import annotations

import os
import select
import socket
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK, plan
from training.core.failure_kinds import SILENT
from training.core.rundir import RunDir
from training.host import env_vars, network
from training.host.placement import Topology
from training.launcher import coordinator, peer, peer_link, reached
from training.launcher.admission import PROTOCOL
from training.launcher.json_socket import LIMIT, ConnectionLost, JsonSocket
from training.launcher.local_ranks import free_port, listen
from training.launcher.peer_link import LostPeer, is_order


def wires() -> tuple[JsonSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return JsonSocket(ours), theirs


def test_messages_arrive_whole_however_they_are_split() -> None:
    wire, other = wires()
    other.sendall(b'{"a": 1}\n{"b"')
    assert wire.receive(1) == {"a": 1}
    assert wire.arrived() == []
    other.sendall(b': 2}\n{"c": 3}\n')
    assert wire.arrived() == [{"b": 2}, {"c": 3}]
    other.sendall(b'{"last": 1}\n')
    other.close()
    assert wire.arrived() == [{"last": 1}], "messages before the end count"
    with pytest.raises(ConnectionLost, match="closed by the other side"):
        wire.arrived()


def test_pings_are_not_messages_and_never_block() -> None:
    wire, other = wires()
    other.setblocking(False)
    while True:  # without a reader the buffer fills
        wire.ping()
        if wire._unsent:
            break
    wire.ping()
    ends = JsonSocket(other)
    while not ends.arrived() and wire._unsent:
        wire.ping()
    wire.send({"a": 1})
    assert ends.receive(5) == {"a": 1}, "whole lines only, despite the full buffer"


def test_any_data_ends_the_silence() -> None:
    wire, other = wires()
    wire.quiet_s = 11.0
    assert wire.arrived() == [] and wire.quiet_s == 11.0
    JsonSocket(other).ping()
    assert wire.arrived() == [] and wire.quiet_s == 0.0


@pytest.mark.parametrize(
    ("node", "addresses", "origin", "found"),
    [
        (0, ["10.0.0.1"], env_vars.HERE, "fast0"),
        (0, ["::ffff:10.0.0.1"] * 2, env_vars.HERE, "fast0"),
        (0, ["10.0.0.1", "192.168.0.1"], env_vars.HERE, "slow0"),
        (0, ["10.0.0.9"], env_vars.HERE, "slow0"),  # behind another address
        (0, [LOOPBACK], env_vars.HERE, "slow0"),
        (0, ["10.0.0.1"], env_vars.KEPT, "slow0"),
        (1, ["10.0.0.1"], env_vars.HERE, "slow0"),
        (0, [], env_vars.HERE, "slow0"),
    ],
)
def test_the_first_machine_uses_the_interface_that_the_others_reach(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: int,
    addresses: list[str],
    origin: str,
    found: str,
) -> None:
    """Its own name is 127.0.1.1 in its /etc/hosts."""
    own = {"10.0.0.1": "fast0", "192.168.0.1": "slow0", LOOPBACK: "lo"}
    monkeypatch.setattr(network, "own_addresses", lambda: own)
    values = {"GLOO_SOCKET_IFNAME": "slow0", "NCCL_SOCKET_IFNAME": "=slow0", "OMP_NUM_THREADS": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    planned = plan(node, 1)
    planned["variables"] = [
        {"name": name, "value": value, "why": "", "origin": origin}
        for name, value in values.items()
    ]
    sockets = [SimpleNamespace(getsockname=partial(tuple, [a, 1])) for a in addresses]
    wires = {number: SimpleNamespace(socket=one) for number, one in enumerate(sockets, 1)}
    line: Any = SimpleNamespace(place=Topology(**planned["place"]), wires=wires)
    reached.correct(RunDir(tmp_path), planned, line)
    expected = {name: value.replace("slow0", found) for name, value in values.items()}
    assert {name: os.environ[name] for name in values} == expected
    assert {one["name"]: one["value"] for one in planned["variables"]} == expected
    assert RunDir(tmp_path).plan.exists() == (found == "fast0")


def over_tcp() -> tuple[JsonSocket, socket.socket]:
    with listen(LOOPBACK, 0, 1) as store:
        ours = socket.create_connection(store.getsockname())
        return JsonSocket(ours), store.accept()[0]


def test_a_second_machine_with_the_number_of_one_that_answers_is_refused() -> None:
    with coordinator.Coordinator(plan(0, free_port(LOOPBACK))) as line:

        def joins(host: str) -> tuple[JsonSocket, socket.socket]:
            ours, theirs = over_tcp()
            hello = {"duet": PROTOCOL, "want": "join", "node": 1, "launch": "abc", "host": host}
            if not line._answer(ours, LOOPBACK, hello):
                (text,) = JsonSocket(theirs).receive(5)["refused"]
                assert f"({LOOPBACK}, host-a)" in text and f"({LOOPBACK}, {host})" in text
            return ours, theirs

        first, there = joins("host-a")
        joins("host-b")
        assert line.wires == {1: first}
        restarted, there = joins("host-a")
        assert line.wires == {1: restarted}
        there.close()  # its process has ended, and another machine takes its place
        replaced, _ = joins("host-b")
        assert line.wires == {1: replaced}


def test_the_kernel_probes_a_connection_too() -> None:
    ours = over_tcp()[0].socket
    read = [
        ours.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    ]
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and read == [5, 2, 10_000]


def test_the_reason_of_a_broken_connection_is_kept_for_the_reader() -> None:
    """The kernel reports it once, here to the ping."""
    wire, other = over_tcp()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()  # with a reset
    wait_until(lambda: select.select([wire], [], [], 0)[0], 5)
    wire.ping()
    wire.ping()
    for _ in range(2):
        with pytest.raises(ConnectionLost, match=r"Connection reset by peer|Broken pipe"):
            wire.receive(None)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"1" * (LIMIT + 100_000)]
)
def test_noise_is_not_a_message(noise: bytes) -> None:
    wire, other = wires()
    threading.Thread(target=lambda: other.sendall(noise), daemon=True).start()
    with pytest.raises(ConnectionLost):
        wire.receive(5)


def test_an_early_order_is_not_lost() -> None:
    """Node 0 may have decided before the ranks here have exited: while they are supervised, or
    while the guilty machine is awaited."""
    line = Quiet()
    victim = {"rank": 1, "victim": True, "kind": "error", "node": 1}
    for message in ({"record": {"rank": 0}}, {"again": {"changes": {}}}):
        JsonSocket(line.other).send(message)
    assert line.settle(victim) == {"rank": 0}
    assert is_order(line.read(0)[0])
    line.keep(0, [{"again": {"changes": {}}}])
    assert line.decide(None) == {"changes": {}}
    for message in ({"go": 7}, {"failed": {"rank": 0}}):
        JsonSocket(line.other).send(message)
    assert line._await(("go",), "") == {"go": 7}
    assert line.read(0) == [{"failed": {"rank": 0}}], "of the next attempt"


def test_the_machine_of_the_failed_rank_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a common disk its error is known here, the state of its GPU is not."""
    line: Any = Quiet()  # of node 1
    seen = {"rank": 0, "victim": False, "kind": "error", "node": 0, "cause": "exception"}
    known = seen | {"cause": "gpu_hardware", "lost_ranks": [0]}
    JsonSocket(line.other).send({"record": known})
    assert line.settle(seen) == known
    own = seen | {"rank": 1, "node": 1}
    assert line.settle(own) == known, "sent before"
    line = Quiet()
    assert line.settle(own) is own
    assert JsonSocket(line.other).receive(1) == {"record": own}
    monkeypatch.setattr(peer_link, "SETTLE_S", 0.1)
    monkeypatch.setattr(peer_link, "DRIVER_S", 0.1)
    assert line.settle(seen) is seen, "the other machine does not answer"


class Quiet(peer.Peer):
    """A connection whose other end is silent."""

    def __init__(self, quiet_s: float = 0.0, *, unreachable: bool = False) -> None:
        super().__init__(plan(1, 1))
        wire, self.other = wires()
        self.met(0, wire, LOOPBACK, "gpu-a\x1b[31m")
        wire.quiet_s = quiet_s
        if unreachable:
            wire.ping()
            wire._acknowledged -= 6


NODE_0 = f"node 0 ({LOOPBACK}, gpu-a31m)"


@pytest.mark.parametrize(
    ("unreachable", "still_s", "cause", "why"),
    [
        (
            True,
            0.0,
            "nccl_network",
            peer_link.UNREACHABLE,
        ),
        (
            False,
            9.0,
            "peer_died",
            peer_link.FROZEN,
        ),
    ],
)
def test_a_silent_peer_is_reported_once(
    unreachable: bool, still_s: float, cause: str, why: str
) -> None:
    line = Quiet(9.5, unreachable=unreachable)
    assert line.watch(still_s) == [] and line.overdue() is not None
    line.wires[0].quiet_s = 11.0
    assert line.watch(still_s) == [LostPeer(0, SILENT, cause, f"{NODE_0} silent for 11 s: {why}")]
    assert line.watch(still_s) == [] and not line.there(0)


def test_a_frozen_supervisor_whose_ranks_continue_is_only_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = Quiet(11.0)
    assert line.watch(0.1) == line.watch(0.1) == []
    assert (
        capsys.readouterr().err.count(
            f"{NODE_0} silent for 11 s: the machine answers, its supervisor does not"
        )
        == 1
    )
    JsonSocket(line.other).ping()
    assert line.read(0) == [] and line.watch(0.1) == [] and line.overdue() is None
    assert f"{NODE_0} answers again" in capsys.readouterr().err


def test_a_supervisor_that_was_stopped_itself_reports_no_peer() -> None:
    line = Quiet()
    line._turned -= 3600
    assert line.watch(3600.0) == [] and line.wires[0].quiet_s <= 1.0


def test_a_lost_peer_is_reported_at_once() -> None:
    own = {"kind": SILENT, "rank": None, "victim": False, "node": 2}
    head = coordinator.Coordinator(plan(0, free_port(LOOPBACK), nodes=3))
    with head:
        far, near = wires()
        head.met(1, far, LOOPBACK, "a")
        far.quiet_s = 11.0
        healthy, other = wires()
        head.met(2, healthy, LOOPBACK, "b")
        assert head.settle(own) is own
        assert JsonSocket(other).receive(1) == {"record": own}
        assert head.missing() == [1]
        assert JsonSocket(near).receive(1) == {"record": own}
