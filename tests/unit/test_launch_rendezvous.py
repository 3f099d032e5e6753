"""Rendezvous of the supervisors of several machines: settings that must be equal, restarts
and stop requests of all of them, other programs on the port."""

from __future__ import annotations

import re
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK, plan
from training.core.errors import Exit, UserError
from training.host import network, ports, process
from training.launcher import coordinator, leadership, peer, rendezvous, same_settings
from training.launcher.admission import PROTOCOL, refusals
from training.launcher.json_socket import JsonSocket, Message
from training.launcher.local_ranks import free_port, listen
from training.launcher.others import Others, asked
from training.launcher.peer_link import PeerLink, Stopped


def test_settings_of_one_machine_may_differ() -> None:
    head, other = plan(0, 1), plan(1, 2, node_rank=1)
    assert same_settings.differences(same_settings.facts(other), same_settings.facts(head), 1) == []
    changed = plan(1, 1, seed=2, depth=3) | {"torch": "2.12", "local_ranks": 4}
    assert same_settings.differences(
        same_settings.facts(changed), same_settings.facts(head), 1
    ) == [
        "depth is 3 on node 1, but 2 in the run",
        "ranks per machine is 4 on node 1, but 2 in the run",
        "seed is 2 on node 1, but 1 in the run",
        "torch is '2.12' on node 1, but '2.13.0' in the run",
    ]


def test_secrets_of_a_script_are_compared_but_not_shown() -> None:
    args = ["--db_password", "hunter2x", "--width=8"]
    head, same, other = (
        {"script": words, "torch": "2"} for words in (args, args, [*args[:-1], "--width=9", 3])
    )
    assert same_settings.differences(same, head, 1) == []
    (text,) = same_settings.differences(other, head, 1)
    own, theirs = ["--db_password", "…", "--width=8"], ["--db_password", "…", "--width=9", "3"]
    assert str(own) in text and str(theirs) in text
    assert "hunter2x" not in str(same_settings.differences({}, head, 1))


def test_folders_of_a_script_may_differ() -> None:
    args = ["--data=/tmp/job1/data", "--out", "~/runs", "--width=8"]
    moved = ["--data=/tmp/job2/data", "--out", "/scratch/runs", "--width=8"]
    head, other, wider = (
        same_settings.facts(plan(0, 1) | {"script": {"args": words}})
        for words in (args, moved, [*moved[:-1], "--width=9"])
    )
    assert same_settings.differences(other, head, 1) == []
    assert len(same_settings.differences(wider, head, 1)) == 1


def test_all_machines_have_the_same_files_of_duet(monkeypatch: pytest.MonkeyPatch) -> None:
    head = same_settings.facts(plan(0, 1))
    assert same_settings.differences(same_settings.facts(plan(1, 1)), head, 1) == []
    monkeypatch.setattr(same_settings, "own_files", lambda: "ab" * 32)
    (text,) = same_settings.differences(same_settings.facts(plan(1, 1)), head, 1)
    assert text.startswith("Duet is '0.1.0 (abababab)' on node 1, but '0.1.0 (")


def test_options_of_a_task_are_settings() -> None:
    """A plan without a task is of an earlier version."""
    options = {"width": 8, "dataroot_gt": "/a"}
    tasks: list[Any] = [
        {"task": {"name": "video_restoration", "options": options | change}}
        for change in ({}, {"dataroot_gt": "/b"}, {"width": 9})
    ]
    head, moved, other = (same_settings.facts(plan(0, 1) | task) for task in tasks)
    assert same_settings.differences(moved, head, 1) == [], "paths are of a machine"
    (text,) = same_settings.differences(other, head, 1)
    assert text == "width is 9 on node 1, but 8 in the run"


@pytest.mark.parametrize(
    ("mine", "others", "found"),
    [
        ("/tmp/job1/data", "/tmp/job2/data", []),  # $SLURM_TMPDIR/data
        ("~/data", "/home/me/data", []),
        ("org/small", "org/large", ["model is 'org/large' on node 1, but 'org/small' in the run"]),
    ],
)
def test_folders_of_a_users_task_may_differ(mine: str, others: str, found: list[str]) -> None:
    """Its options have no units."""
    head, other = (
        same_settings.facts(
            plan(node, 1)
            | {"task": {"name": "clips", "file": "/a/clips.py", "options": {"model": value}}}  # type: ignore[arg-type]
        )
        for node, value in ((0, mine), (1, others))
    )
    assert same_settings.differences(other, head, 1) == found


@pytest.mark.parametrize(
    ("name", "mine", "other"), [("precision", "bf16", "fp16"), ("device", "cuda", "cpu")]
)
def test_machines_that_decide_otherwise_differ(name: str, mine: str, other: str) -> None:
    same = {"precision": {"value": "fp32", "reason": ""}, "device": {"value": "cpu", "reason": ""}}
    ours, theirs = (
        same_settings.facts(plan(node, 1, device="auto") | same | {name: {"value": value}})  # type: ignore[arg-type]
        for node, value in ((0, mine), (1, other))
    )
    (text,) = same_settings.differences(theirs, ours, 1)
    assert text == f"{name} is {other!r} on node 1, but {mine!r} in the run"


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


def test_two_machines_connect_and_start() -> None:
    port = free_port(LOOPBACK)

    def member() -> Any:
        own = plan(1, port)
        name, own["launch"], _ = rendezvous.ask(own, 10)
        with peer.Peer(own) as line:
            line.gather(10)
            line.replica_ports[1] = 4711
            return name, line.go(), line.secret

    thread, out = in_thread(member)
    with coordinator.Coordinator(plan(0, port)) as line:
        line.gather(10)
        team = line.go()
        assert (list(team.ranks), team.world_size, team.port) == (
            [0, 1],
            4,
            port,
        ) and team.store is not None
        assert line.replica_ports == {1: 4711}
    thread.join(10)
    name, theirs, secret = out[0]
    assert secret == line.secret and len(secret) == 64
    assert name == "a_run" and (list(theirs.ranks), theirs.port, theirs.store) == (
        [2, 3],
        port,
        None,
    )


@pytest.mark.skipif("::1" not in network.own_addresses(), reason="this machine has no IPv6")
@pytest.mark.parametrize("reached", ["::1", LOOPBACK])
def test_node_0_with_an_ipv6_address_that_it_does_not_have_is_reached_by_both(reached: str) -> None:
    """As behind a service."""
    port = free_port(LOOPBACK)
    own, other = plan(0, port), plan(1, port)
    own["place"]["master_addr"], other["place"]["master_addr"] = "::1", reached

    def member() -> Any:
        with peer.Peer(other) as line:
            line.gather(10)
            return line.go()

    thread, out = in_thread(member)
    with coordinator.Coordinator(own) as line:
        line.gather(10)
        assert line.go().address == LOOPBACK
    thread.join(10)
    assert out[0].port == port


@pytest.mark.parametrize("name", ["10.0.0..1", f"{'a' * 64}.example.org"])
def test_an_invalid_address_is_reported_like_an_unknown_one(name: str) -> None:
    own = plan(1, 29500)
    own["place"]["master_addr"] = name
    with pytest.raises(UserError) as caught:
        rendezvous.ask(own, 0)
    assert caught.value.code == Exit.RESOURCES
    assert f"unknown host name '{name}' (not a valid name)" in str(caught.value)
    assert leadership.ask((name, 29500), {}) == ("unknown", {})


def test_two_machines_restart() -> None:
    """Node 0 decides; late messages of the last attempt are ignored."""
    port = free_port(LOOPBACK)

    def member() -> Any:
        with peer.Peer(plan(1, port)) as line:
            line.gather(10)
            seen = [line.go()]
            line.send_all({"failed": {"rank": 2, "status": -9}})
            orders = [line.decide(None)]
            seen.append(line.go())
            orders.append(line.decide(None))
            return seen, orders, line.failed

    thread, out = in_thread(member)
    with coordinator.Coordinator(plan(0, port)) as line:
        line.gather(10)
        line.go().close()
        line.send_all({"record": {"rank": 2}})
        assert line.decide({"changes": {"device_batch_size": 4}}) == {
            "changes": {"device_batch_size": 4}
        }
        team = line.go()
        assert team.store is not None and team.store.getsockname()[1] == team.port == line.port
        assert line.read(1) == [], "no message of the first attempt is left"
        assert line.decide(None) is None
    thread.join(10)
    seen, orders, failed = out[0]
    assert [list(t.ranks) for t in seen] == [[2, 3], [2, 3]] and seen[1].port == team.port
    assert orders == [{"changes": {"device_batch_size": 4}}, None] and failed is None


def test_the_first_to_end_waits_for_the_last() -> None:
    """Node 0 reports the end of the run when all have ended; a stop request reaches all of them,
    once."""
    port = free_port(LOOPBACK)

    def heard(line: PeerLink, node: int) -> dict[str, Any]:
        wait_until(lambda: select.select([line.wires[node]], [], [], 0.02)[0], 10)
        return line.read(node)[0]

    def member() -> Any:
        with peer.Peer(plan(1, port)) as line:
            line.gather(10)
            line.go()
            ours = Others(line)
            received = [asked(heard(line, 0)), ours.wait(75)]
            end = heard(line, 0)
            ours.ended[0] = end["ended"]
            return [*received, end, ours.wait(75)]

    thread, out = in_thread(member)
    with coordinator.Coordinator(plan(0, port)) as line:
        line.gather(10)
        line.go().close()
        ours = Others(line)
        ours.pass_on(signal.SIGTERM, 1, None)
        assert ours.wait(0) and ours.running() == [1]
        assert heard(line, 1) == {"ended": 75}
        ours.ended[1] = 75
        assert not ours.wait(75)
        thread.join(10)
    assert out == [[(signal.SIGTERM, 1), True, {"ended": 75}, False]]


@pytest.mark.parametrize(
    "message", [{}, {"asked": 9, "times": 1}, {"asked": "15", "times": 1}, {"asked": 15}]
)
def test_a_stop_request_from_the_network_is_validated(message: dict[str, Any]) -> None:
    assert asked(message) is None


def test_a_stop_request_after_a_failure_reaches_the_other_machines() -> None:
    port = free_port(LOOPBACK)

    def member() -> Any:
        with peer.Peer(plan(1, port)) as line:
            line.gather(10)
            line.go()
            return line.decide(None), line.stopped

    thread, out = in_thread(member)
    with coordinator.Coordinator(plan(0, port)) as line:
        line.gather(10)
        line.go().close()
        line.decide(None, 75)
        thread.join(10)
    assert out == [(None, 75)]


def test_a_node_lost_before_the_start_is_reported_to_all() -> None:
    port, all_here = free_port(LOOPBACK), threading.Event()

    def leaves() -> None:
        with peer.Peer(plan(1, port, nodes=3)) as line:
            line.gather(10)
            all_here.wait(10)

    def stays() -> Any:
        with peer.Peer(plan(2, port, nodes=3)) as line:
            line.gather(10)
            return line.go()

    threads = [in_thread(leaves), in_thread(stays)]
    why = (
        f"before the start: node 1 ({LOOPBACK}, {socket.gethostname()}) is lost: closed by the "
        f"other side"
    )
    with coordinator.Coordinator(plan(0, port, nodes=3)) as line:
        line.gather(10)
        all_here.set()
        with pytest.raises(UserError, match=re.escape(why)) as caught:
            line.go()
    for thread, _ in threads:
        thread.join(10)
    (lost,) = threads[1][1]
    assert caught.value.code == lost.code == Exit.RESOURCES and why in str(lost)


def test_another_plan_is_refused_and_the_wait_continues() -> None:
    port, gathered = free_port(LOOPBACK), threading.Event()

    def joins() -> UserError:
        with pytest.raises(UserError) as refused:
            rendezvous.ask(plan(1, port, seed=7), 10)
        with peer.Peer(plan(1, port)) as line:
            line.gather(10)
            gathered.wait(20)
        return refused.value

    with coordinator.Coordinator(plan(0, port)) as line:
        thread, out = in_thread(joins)
        line.gather(20)
        gathered.set()
        thread.join(10)
    assert "seed is 7 on node 1, but 1 in the run" in str(out[0]) and out[0].code == Exit.CONFIG


def test_a_stop_while_node_0_answers_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a machine that has joined and left."""

    class Interrupted(JsonSocket):
        def receive(self, seconds: float | None) -> Message:
            super().receive(seconds)
            raise process.StopAsked(signal.SIGTERM)

    def joins() -> None:
        with peer.Peer(plan(1, port)) as line, pytest.raises(process.StopAsked):
            line.gather(10)

    port = free_port(LOOPBACK)
    monkeypatch.setattr(rendezvous, "JsonSocket", Interrupted)
    with coordinator.Coordinator(plan(0, port)) as line:
        thread, _ = in_thread(joins)
        with pytest.raises(Stopped) as stopped:
            line.gather(5)
            line.go()
        thread.join(10)
    assert (stopped.value.number, stopped.value.node) == (signal.SIGTERM, 1)


@pytest.mark.parametrize("node", [0, 2, 9, "1", None])
def test_an_unexpected_node_is_refused(node: object) -> None:
    def refused(**message: object) -> list[str]:
        return refusals({"duet": PROTOCOL, **message}, plan(0, 1), 0, {})

    assert any("node_rank" in text for text in refused(node=node))
    assert refused(duet=0, node=1) == ["its launcher has another protocol version"]
    assert refused(want="join", launch="old", node=1) == ["it belongs to another launch"]


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "", 7, None])
def test_a_run_name_from_the_network_is_not_a_path(name: object) -> None:
    port = free_port(LOOPBACK)
    with coordinator.Coordinator(plan(0, port) | {"run_name": name}) as line:
        thread, out = in_thread(lambda: rendezvous.ask(plan(1, port), 5))
        with pytest.raises(UserError):
            line.gather(1.0)
        thread.join(5)
    assert isinstance(out[0], UserError)


def test_another_program_on_the_port_does_not_answer() -> None:
    port = free_port(LOOPBACK)
    with listen(LOOPBACK, port, 5), pytest.raises(UserError) as caught:
        rendezvous.ask(plan(1, port), 0.5)
    assert "another program listens there" in str(caught.value)


def test_ports() -> None:
    assert free_port(LOOPBACK) in ports.QUIET
    with listen(LOOPBACK, 0, 1) as taken:
        wanted = taken.getsockname()[1]
        with listen(LOOPBACK, wanted, 1) as other:
            assert wanted < other.getsockname()[1] < wanted + 10
