"""`--min_ranks` on several machines: which ranks remain after the loss of a machine, on which
machine, and how a machine joins again."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK
from tests.unit.node_plans import plan as plan_of_node
from tests.unit.test_launch_connections import wires
from tests.unit.test_launch_fewer_ranks import failed, gpu, plan
from tests.unit.test_launch_recovery import record, run
from tests.unit.test_launch_rendezvous import in_thread
from training.core.errors import Exit, UserError
from training.core.failure_kinds import GONE, SILENT
from training.core.rundir import RunDir, write_json
from training.host.placement import Topology
from training.launcher import (
    coordinator,
    fewer_ranks,
    last_call,
    listener,
    local_ranks,
    peer,
    peer_link,
    recovery,
    rendezvous,
    replan,
    same_settings,
    seats,
)
from training.launcher.admission import PROTOCOL
from training.launcher.json_socket import JsonSocket
from training.launcher.local_ranks import free_port
from training.launcher.outcome import Outcome
from training.launcher.peer_link import Stopped, Waiting
from training.launcher.peer_messages import PeerMessages
from training.launcher.recovery import Recovery
from training.launcher.recovery_policy import remedy
from training.launcher.restart import Failure, GiveUp, Restart, Team

__all__ = ["run"]  # a fixture


def node_plan(node: int, nodes: int = 3, **more: Any) -> dict[str, Any]:
    """Plan of a machine with two ranks."""
    made = plan(2 * nodes, **more)
    gpus = [gpu(0), gpu(1)]
    own = {"per_node": 2, "gpus": gpus, "bindings": [None] * 2}
    place = {"node_rank": node, "nnodes": nodes}
    return made | {
        "local_ranks": 2,
        "gpus": gpus,
        "numa": {"value": [None] * 2, "memory": True, "reason": ""},
        "place": place,
        "elastic": made["elastic"] | own,
    }


def lost(*nodes: int, kind: Any = SILENT, back: tuple[int, ...] = ()) -> Failure:
    return Failure("nccl_network", kind, None, 0, 23, 20, "", "gone", nodes=nodes, back=back)


def after(before: dict[str, Any], failure: Failure) -> dict[str, Any]:
    chosen = remedy(failure, before, [])  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.team, chosen
    return dict(replan.with_team(before, chosen.team, chosen.why))  # type: ignore[arg-type]


def test_every_machine_finds_its_own_ranks() -> None:
    for node, ranks, gpus in ((0, range(2), 2), (1, range(2, 2), 0), (2, range(2, 4), 2)):
        found = after(node_plan(node), lost(1))
        assert found["elastic"]["seats"] == [0, 1, 4, 5]
        assert seats.ranks(found) == ranks  # type: ignore[arg-type]
        assert (found["ranks"], found["local_ranks"], len(found["gpus"])) == (4, len(ranks), gpus)
        assert [one["node"] for one in found["elastic"]["lost"]] == [1, 1]
    team = local_ranks.of_node(found, "a", 1)  # type: ignore[arg-type]
    variables = team.variables(3, ours=False)
    assert (variables["LOCAL_RANK"], variables["GROUP_RANK"]) == ("1", "1")
    assert variables["GROUP_WORLD_SIZE"] == "2"


def test_one_gpu_of_a_machine_is_named_with_it() -> None:
    before = node_plan(1)
    found = after(before, failed(3))
    assert fewer_ranks.names(found, [3]) == "GPU 1 on node 1"  # type: ignore[arg-type]
    found = after(found, lost(1))
    assert fewer_ranks.names(found, [2, 3]) == "node 1"  # type: ignore[arg-type]
    assert found["elastic"]["seats"] == [0, 1, 4, 5]


def test_a_silent_machine_gets_time_to_end_its_ranks() -> None:
    chosen = remedy(lost(2), node_plan(0), [])  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.pause_s == fewer_ranks.SILENT_PAUSE_S


def test_a_machine_without_a_rank_replaces_the_next_lost_one() -> None:
    """8 sequences: 4 ranks of 6."""
    found = after(node_plan(0, 4, size=1, total=8 * 32), lost(2))
    assert found["elastic"]["seats"] == [0, 1, 2, 3]
    assert seats.nodes(found) == [0, 1]  # type: ignore[arg-type]
    assert after(found, lost(1))["elastic"]["seats"] == [0, 1, 6, 7]


def test_without_a_rank_on_the_first_machine_the_run_ends() -> None:
    found = after(node_plan(0), failed(0))
    assert isinstance(remedy(failed(0), found, []), GiveUp)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [True, False])
def test_a_coordinator_with_a_bad_disk_leaves_the_run_to_another(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`other`: one with a disk of its own is connected."""
    monkeypatch.setattr(recovery.os, "access", lambda *_: False)
    tried = recovery.Recovery(run, node_plan(0))  # type: ignore[arg-type]
    line = SimpleNamespace(missing=list, ready_again=[], other_disks=lambda: other)
    assert tried.choose(record(), Outcome(), line) is None  # type: ignore[arg-type]
    assert tried.hand_over is other and "cannot be written" in tried.given_up


def test_another_failure_is_restarted_with_the_machines_that_are_back() -> None:
    found = after(node_plan(0), lost(1))
    killed = failed(0, "killed", back=(2, 3))
    chosen = fewer_ranks.with_machines(Restart(1), killed, found)  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.team and chosen.number == 1
    assert isinstance(chosen.team, Team) and chosen.team.seats == (0, 1, 2, 3, 4, 5)
    found = dict(replan.with_team(found, chosen.team, ""))  # type: ignore[arg-type]
    assert found["elastic"]["lost"] == []


def test_a_code_error_is_not_the_machine_s() -> None:
    raised = Failure("code_error", "error", 0, 1, 23, 20, "", "ValueError", nodes=(1,))
    assert isinstance(remedy(raised, node_plan(0), []), GiveUp)  # type: ignore[arg-type]


def of_network(node: int, port: int) -> dict[str, Any]:
    made = plan_of_node(node, port)
    elastic = {"per_node": 2, "ranks": 4, "seats": [0, 1, 2, 3], "lost": [], "rejoined": []}
    return made | {"elastic": elastic | {"min_ranks": 2}}


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
        run.forget_before(0.0)
        place = Topology(**of_network(1, port)["place"])
        asking, out = in_thread(lambda: rendezvous.ask_resumed(place, 10))
        wait_until(lambda: (line.greet_late(), not asking.is_alive())[1], 10)
    assert out == [{"run": "a_run", "plan": {"config": {"seed": 1}}, "manifest": None}]


class Line:
    """Node 0's connections: `away` are missing, `back` have joined again."""

    def __init__(self, away: tuple[int, ...], back: tuple[int, ...]) -> None:
        self.away, self.ready_again = away, back

    def missing(self) -> list[int]:
        return list(self.away)


def test_a_machine_that_is_back_before_the_restart_waits_for_a_checkpoint(run: RunDir) -> None:
    """Its launcher was started again within the grace of the other ranks."""
    tried = Recovery(run, node_plan(0))  # type: ignore[arg-type]
    gone = record(kind="gone", cause="peer_died", rank=None, status=0, node=1)
    chosen = tried.choose(gone, Outcome(), Line((1,), (1,)))  # type: ignore[arg-type]
    assert chosen and chosen.team and chosen.team.back == ()
    order = tried.order(chosen)["team"]
    away = {one["seat"] for one in order["lost"]}
    assert away == {2, 3} and not away.intersection(order["seats"])


def test_a_machine_that_takes_over_knows_the_batch_that_was_too_large(
    run: RunDir, tmp_path: Path
) -> None:
    """4 sequences were out of memory: 2 were left, and no later choice of ranks has more."""
    first, second = node_plan(0), node_plan(1)
    order = Recovery(run, first).order(Restart(1, {"device_batch_size": 2}, "gpu_oom"))  # type: ignore[arg-type]
    other = RunDir(tmp_path / "run", 1)
    other.create()
    assert Recovery(other, second).follow(order, None)  # type: ignore[arg-type]
    assert second["config"]["device_batch_size"] == 2 == second["elastic"]["device_batch_size"]
    second["place"]["leader"] = 1
    assert after(second, lost(0))["config"]["device_batch_size"] == 2


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

    far, near = wires()
    own = of_network(0, port)
    own["place"] |= {"nnodes": 3}
    with coordinator.Coordinator(own) as line:  # type: ignore[arg-type]
        line._begun = True
        line.met(2, far, LOOPBACK, "c")
        assert not line.await_machine("too few", Waiting(), 0.3)
        assert JsonSocket(near).arrived() == [{"undecided": "too few"}]
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


def test_a_machine_that_is_lost_after_the_decision_is_reported() -> None:
    """It had joined again, and the ranks were saving: the restart must not wait for its ranks."""
    port = free_port(LOOPBACK)
    with coordinator.Coordinator(of_network(0, port)) as line:  # type: ignore[arg-type]
        line._begun, line._expected = True, set()
        line.decide({"team": {"lost": []}})
        assert line.go() is None
        assert line.lost_peer and line.lost_peer.node == 1 and line.lost_peer.kind == GONE
        line.decide({"team": {"lost": [{"seat": seat} for seat in (2, 3)]}})
        team = line.go()
        assert team
        team.close()


def test_a_stop_request_between_two_starts_ends_all_machines() -> None:
    """It arrives at node 1, which waits for the order of node 0."""
    port = free_port(LOOPBACK)

    def member() -> Any:
        with peer.Peer(of_network(1, port)) as line:  # type: ignore[arg-type]
            line.gather(10)
            line.go()
            line.stop(signal.SIGTERM)
        return True

    thread, out = in_thread(member)
    with coordinator.Coordinator(of_network(0, port)) as line:  # type: ignore[arg-type]
        line.gather(10)
        team = line.go()
        assert team
        team.close()
        line.decide({"team": {"lost": []}})
        with pytest.raises(Stopped) as stopped:
            line.go()
        thread.join(10)
    assert out == [True] and stopped.value.number == signal.SIGTERM


def test_a_stop_request_is_not_lost_while_the_failure_is_examined() -> None:
    far, near = wires()
    with coordinator.Coordinator(of_network(0, free_port(LOOPBACK))) as line:  # type: ignore[arg-type]
        line._begun = True
        line.met(1, far, LOOPBACK, "a")
        for message in ({"asked": int(signal.SIGINT), "times": 1}, {"record": {"rank": 2}}):
            JsonSocket(near).send(message)
        line.settle({"rank": None, "victim": True, "kind": "died"})  # type: ignore[typeddict-item]
        line.decide({"team": {"lost": []}})
        with pytest.raises(Stopped) as stopped:
            line.go()
        assert stopped.value.number == signal.SIGINT
        line.stop(signal.SIGINT)
        received = JsonSocket(near).arrived()
    assert received[-1] == {"over": Exit.INTERRUPTED}


def test_a_late_report_of_readiness_is_not_a_failure() -> None:
    """A machine sends it for a start that was abandoned because another one was lost."""
    calls: list[str] = []
    link = SimpleNamespace(read=lambda node: [{"ready": True}], keep=lambda *_: None)
    state = SimpleNamespace(link=SimpleNamespace(**vars(link), wires={}), outcome=Outcome())
    failure = SimpleNamespace(of_peer=lambda: calls.append("failure"))
    made = PeerMessages(state, None, failure, None)  # type: ignore[arg-type]
    made._read(1, 0)
    assert not calls


@pytest.mark.parametrize("message", ["failed", "record", "again", "over"])
def test_while_a_script_is_ended_for_more_ranks_any_end_of_another_machine_counts(
    message: str,
) -> None:
    """Its ranks are ended like those of this machine, whatever it reports."""
    outcome = Outcome(ours=False, resized=True)
    others = SimpleNamespace(ended={}, running=lambda: [1])
    link = SimpleNamespace(read=lambda node: [{message: {}}], keep=lambda *_: None, wires={})
    state = SimpleNamespace(link=link, outcome=outcome, others=others)
    PeerMessages(state, None, None, None)._read(1, 0)  # type: ignore[arg-type]
    assert others.ended == {1: Exit.DONE} and outcome.guilty is None


def test_a_coordinator_that_decides_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are stopped, or wait for a disk: its kernel keeps the connection."""
    monkeypatch.setattr(peer_link, "BETWEEN_STARTS_S", 0.0)
    far, near = wires()
    own = of_network(1, free_port(LOOPBACK))
    own["config"]["rendezvous_timeout"] = 0.1
    with peer.Peer(own) as line, socket.create_server((LOOPBACK, 0)) as own_socket:  # type: ignore[arg-type]
        line._begun, line.listener = True, listener.Listener(own_socket)
        line.met(0, far, LOOPBACK, "a")
        assert line.decide(None) is None
        assert line.lost_leader and (line.lost_leader.node, line.lost_leader.kind) == (0, SILENT)
    near.close()


def test_a_coordinator_that_waits_for_a_machine_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock(Waiting):
        """Each look takes 25 s."""

        passed = 0.0

        @property
        def seconds(self) -> float:
            self.passed += 25.0
            return self.passed

    far, _near = wires()
    messages = iter([*[[{"undecided": "too few"}]] * 3, [{"again": {"why": "back"}}]])
    monkeypatch.setattr(peer, "Waiting", Clock)
    own = of_network(1, free_port(LOOPBACK))  # rendezvous_timeout is 60
    with peer.Peer(own) as line, socket.create_server((LOOPBACK, 0)) as own_socket:  # type: ignore[arg-type]
        line._begun, line.listener = True, listener.Listener(own_socket)
        line.met(0, far, LOOPBACK, "a")
        monkeypatch.setattr(line, "read", lambda node: next(messages))
        assert line.decide(None) == {"why": "back"}


@pytest.mark.parametrize("want", [{}, {"want": "shutdown"}, {"want": 7}])
def test_an_unknown_question_with_the_right_settings_is_harmless(want: dict[str, Any]) -> None:
    port = free_port(LOOPBACK)
    own = of_network(1, port)
    question = {"duet": PROTOCOL, "node": 1} | want
    with coordinator.Coordinator(of_network(0, port)) as line:  # type: ignore[arg-type]
        far, near = wires()
        joined = line._answer(far, LOOPBACK, question | {"facts": same_settings.facts(own)})  # type: ignore[arg-type]
        assert not joined and JsonSocket(near).receive(1)["run"] == "a_run"


def test_the_log_line_of_a_refused_program_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noise = "\x1b[2J\n[SUCCESS] forged " + "x" * 10_000
    with coordinator.Coordinator(of_network(0, free_port(LOOPBACK))) as line:  # type: ignore[arg-type]
        right = {"duet": PROTOCOL, "node": 1, "facts": {noise: noise}}
        for message in ({"duet": 0, "node": noise}, right):
            far, _near = wires()
            assert not line._answer(far, LOOPBACK, message)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2 and "\x1b" not in shown
    assert len(shown) < 6000


def test_connections_without_a_message_are_limited_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "UNKNOWN", 2)
    port = free_port(LOOPBACK)
    with coordinator.Coordinator(of_network(0, port)) as line, ExitStack() as stack:  # type: ignore[arg-type]
        for _ in range(5):
            stack.enter_context(socket.create_connection((LOOPBACK, port)))
        line.greet_late()
        assert len(line._listener._unknown) == 2
        monkeypatch.setattr(listener, "ANSWER_S", -1.0)
        for _ in range(3):
            line.greet_late()
        assert not line._listener._unknown
