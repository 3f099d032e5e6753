"""Machines that join a run with --min_ranks: late at its start, after a loss, or below the minimum."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK
from tests.unit.test_launch_connections import wires
from tests.unit.test_launch_fewer_machines import Line, node_plan, of_network
from tests.unit.test_launch_recovery import record, run
from tests.unit.test_launch_rendezvous import in_thread
from training.core.errors import UserError
from training.core.rundir import RunDir, write_json
from training.host import ports
from training.host.placement import Topology
from training.launcher import (
    coordinator,
    last_call,
    peer,
    rendezvous,
)
from training.launcher.json_socket import JsonSocket
from training.launcher.local_ranks import free_port
from training.launcher.outcome import Outcome
from training.launcher.peer_link import Stopped
from training.launcher.recovery import Recovery
from training.launcher.waiting import Waiting

__all__ = ["run"]  # a fixture


def test_a_script_starts_before_all_machines_have_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later machine joins as if it had been lost."""
    monkeypatch.setattr(coordinator, "LAST_CALL_S", 0.3)
    port, release = free_port(LOOPBACK), threading.Event()

    def of_three(node: int) -> dict[str, Any]:
        made = of_network(node, port) | {"script": {"args": []}, "ranks": 6}
        place = made["place"] | {"nnodes": 3}
        least = {"ranks": 6, "seats": list(range(6)), "min_ranks": 4}
        return made | {"place": place, "elastic": made["elastic"] | least}

    def member(node: int) -> Any:
        with peer.Peer(of_three(node)) as line:  # type: ignore[arg-type]
            line.gather(10)
            started = line.go()
            release.wait(10)
            return started

    with coordinator.Coordinator(of_three(0)) as line:  # type: ignore[arg-type]
        with pytest.raises(UserError, match="node 1, 2 of 3"):
            line.gather(0.5)  # too few
        threads = [in_thread(lambda: member(1))[0]]
        line.gather(60)
        assert line.absent == [2]
        line.decide({"team": {"lost": [{"seat": 4}, {"seat": 5}]}})
        threads += [in_thread(lambda: member(2))[0]]
        wait_until(lambda: (line.greet_late(), line.ready_again)[1] == (2,), 10)
        assert list(line.wires) == [1]
        line.waiting[2].send({"again": {}})
        release.set()
        for thread in threads:
            thread.join(10)


def test_a_training_waits_for_all_machines_before_it_starts_without_one() -> None:
    own = of_network(0, free_port(LOOPBACK))
    with coordinator.Coordinator(own) as line:  # type: ignore[arg-type]
        line.gather(0.3)
        assert line.absent == [1]


def test_the_ranks_meet_before_the_last_port() -> None:
    """They cannot take the next one, since node 0 listens for machines that join."""

    def member() -> Any:
        with peer.Peer(of_network(1, ports.LAST)) as line:  # type: ignore[arg-type]
            line.gather(10)
            return line.go()

    thread, out = in_thread(member)
    with coordinator.Coordinator(of_network(0, ports.LAST)) as line:  # type: ignore[arg-type]
        line.gather(10)
        team = line.go()
        assert team and ports.LAST - ports.TRIES <= team.port < ports.LAST
        team.close()
    thread.join(10)
    assert out[0].port == team.port


def test_the_plan_of_a_start_without_a_machine(run: RunDir) -> None:
    made = of_network(0, free_port(LOOPBACK))
    own = made | node_plan(0)
    own["place"] = made["place"] | {"nnodes": 3}
    own["config"] |= made["config"]
    with coordinator.Coordinator(own) as line:  # type: ignore[arg-type]
        line.absent = [1]
        sent: list[Any] = []
        line.decide = sent.append  # type: ignore[assignment,method-assign]
        last_call.leave_out(run, own, line)  # type: ignore[arg-type]
        assert (own["ranks"], own["elastic"]["seats"]) == (4, [0, 1, 4, 5])
        assert [one["node"] for one in own["elastic"]["lost"]] == [1, 1]
        tried = Recovery(RunDir(run.path, 2), other := made | node_plan(2))  # type: ignore
        tried.run.create()
        assert tried.follow(sent[0], None) and tried.attempt == 1
        assert other["elastic"]["seats"] == own["elastic"]["seats"]
        assert "without node 1" in (tried.finish())
        own["elastic"]["min_ranks"] = 5
        line.absent = [2]
        with pytest.raises(UserError, match="min_ranks is 5"):
            last_call.leave_out(run, own, line)  # type: ignore[arg-type]


def test_a_lost_machine_joins_while_ranks_run() -> None:
    port, release = free_port(LOOPBACK), threading.Event()

    def member() -> Any:
        with peer.Peer(of_network(1, port)) as line:  # type: ignore[arg-type]
            line.gather(10)
            line.go()
            release.wait(10)
        return None

    def again() -> Any:
        own = of_network(1, port)
        _, own["launch"], _ = rendezvous.ask(own, 10)  # type: ignore[arg-type]
        with peer.Peer(own) as line:  # type: ignore[arg-type]
            line.gather(10)
            assert line.go() is None
            order = line.decide(None)
            team = line.go()
            return order, team and team.port

    thread, _ = in_thread(member)
    with coordinator.Coordinator(of_network(0, port)) as line:  # type: ignore[arg-type]
        line.gather(10)
        team = line.go()
        assert team and team.port != port, "it keeps listening at its own"
        team.close()
        with pytest.raises(UserError, match="part of the run already"):
            refused, out = in_thread(lambda: _refusal(port))
            wait_until(lambda: (line.greet_late(), not refused.is_alive())[1], 10)
            raise out[0]
        release.set()
        thread.join(10)
        wait_until(lambda: any("gone" in m for m in line.read(1)), 10)
        away = [{"seat": seat} for seat in (2, 3)]
        line.decide({"team": {"lost": away}})
        team = line.go()
        assert team and not line.missing(), "node 0 continues alone"
        team.close()
        thread, results = in_thread(again)
        wait_until(lambda: (line.greet_late(), line.ready_again)[1] == (1,), 10)
        order = {"team": {"lost": []}}
        line.decide(order)
        team = line.go()
        assert team
        team.close()
        thread.join(10)
        assert results == [(order, team.port)]


def _refusal(port: int) -> UserError | None:
    try:
        rendezvous.ask(of_network(1, port), 10)  # type: ignore[arg-type]
    except UserError as error:
        return error
    return None


def test_a_lost_machine_of_a_resumed_run_gets_its_settings_again(tmp_path: Path) -> None:
    """The first failure removes the plan before the resume."""
    port, run = free_port(LOOPBACK), RunDir(tmp_path / "a_run")
    run.create()
    write_json(run.plan_before, {"config": {"seed": 1}})
    own = of_network(0, port) | {"resume": True, "run_dir": str(run.path)}
    with coordinator.Coordinator(own) as line:  # type: ignore[arg-type]
        run.forget_before({"created": 0.0}, run.summary)  # type: ignore[typeddict-item]
        place = Topology(**of_network(1, port)["place"])
        asking, out = in_thread(lambda: rendezvous.ask_resumed(place, 10))
        wait_until(lambda: (line.greet_late(), not asking.is_alive())[1], 10)
    assert out == [{"run": "a_run", "plan": {"config": {"seed": 1}}, "manifest": None}]


@pytest.mark.parametrize(("joined", "used"), [((1,), (0, 1)), ((1, 2), (0, 1, 2)), ((), ())])
def test_below_the_minimum_the_run_waits_for_a_machine(
    run: RunDir, joined: tuple[int, ...], used: tuple[int, ...]
) -> None:
    own, line, waits = node_plan(0, least=4), Line((1, 2), ()), iter([True, False])
    tried = Recovery(run, own)  # type: ignore[arg-type]

    def wait(why: str) -> bool:
        line.ready_again = joined
        return bool(joined) and next(waits)

    gone = record(kind="gone", cause="peer_died", rank=None, status=0, node=1)
    chosen = tried.choose(gone, Outcome(), line, wait)  # type: ignore[arg-type]
    assert bool(chosen) is bool(joined)
    if not chosen:
        assert "min_ranks is 4" in tried.given_up
        return
    assert chosen.number == 0, "it does not count"
    seats_used = tried.order(chosen)["team"]["seats"]
    assert {seat // 2 for seat in seats_used} == set(used)


def test_a_machine_that_joins_ends_the_wait() -> None:
    port = free_port(LOOPBACK)

    def member() -> Any:
        with peer.Peer(of_network(1, port)) as line:  # type: ignore[arg-type]
            line.gather(10)
            return line.go()

    def waits_in_vain() -> bool:
        """Without any turn where this process gets no processor."""
        assert not line.await_machine("too few", Waiting(), 0.3)
        return JsonSocket(near).arrived() == [{"undecided": "too few"}]

    far, near = wires()
    own = of_network(0, port)
    own["place"] |= {"nnodes": 3}
    with coordinator.Coordinator(own) as line:  # type: ignore[arg-type]
        line._begun = True
        line.met(2, far, LOOPBACK, "c")
        wait_until(waits_in_vain)
        thread, _ = in_thread(member)
        assert line.await_machine("too few", Waiting(), 20) and line.ready_again == (1,)
        assert not line.await_machine("too few", Waiting(), 20), "all are there"
        line.waiting[1].send({"again": {}})
        thread.join(10)
        JsonSocket(near).send({"asked": int(signal.SIGINT), "times": 1})
        line.waiting.pop(1).close()
        line._ready_again.clear()
        with pytest.raises(Stopped):
            line.await_machine("too few", Waiting(), 20)
