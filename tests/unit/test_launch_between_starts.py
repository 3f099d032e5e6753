"""What happens on several machines between two starts: losses, stop requests, questions."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.node_plans import LOOPBACK
from tests.unit.test_launch_connections import wires
from tests.unit.test_launch_fewer_machines import of_network
from tests.unit.test_launch_full_disk import REPORTED, Others, leader, run
from tests.unit.test_launch_rendezvous import in_thread
from training.core.errors import Exit
from training.core.failure_kinds import GONE, SILENT
from training.core.rundir import RunDir, read_json
from training.launcher import coordinator, listener, peer, peer_link, same_settings
from training.launcher import leader as leading
from training.launcher.admission import PROTOCOL
from training.launcher.json_socket import JsonSocket
from training.launcher.local_ranks import free_port
from training.launcher.outcome import Outcome
from training.launcher.peer_link import Stopped
from training.launcher.peer_messages import PeerMessages
from training.launcher.restart import Restart
from training.launcher.waiting import Waiting

__all__ = ["run"]  # fixture


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


def test_a_stop_request_while_ranks_end_after_a_failure_ends_all_machines(run: RunDir) -> None:
    """With the code of the signal, not of the failure, if they would have been restarted."""
    line = Others(run)
    made = leader(run, line, elastic=False)
    recovery = made.launch.recovery
    del recovery.choose  # that of the class
    recovery._failures.clear()
    outcome = Outcome(asked=Exit.PREEMPTED, guilty=(1, 1), late_stop=signal.SIGTERM)
    assert made.recover(outcome, REPORTED) == Exit.PREEMPTED
    assert line.decided == [(None, Exit.PREEMPTED)]
    assert (read_json(run.failure) or {})["exit_code"] == Exit.PREEMPTED


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


def test_a_machine_that_pauses_before_a_restart_is_not_silent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would take over from one that is silent for longer than a healthy one."""
    monkeypatch.setattr(leading, "PING_S", 0.05)
    far, near = wires()
    with coordinator.Coordinator(of_network(0, free_port(LOOPBACK))) as line:  # type: ignore[arg-type]
        line._begun = True
        line.met(1, far, LOOPBACK, "a")
        made = leader(run, line, elastic=False)  # type: ignore[arg-type]
        assert not made._pause(Restart(1)), "none"
        assert JsonSocket(near).arrived() == []
        assert not made._pause(Restart(1, pause_s=0.3))
        told = JsonSocket(near).arrived()
        assert len(told) > 1 and all(one.keys() == {"undecided"} for one in told)
        JsonSocket(near).send({"asked": int(signal.SIGTERM), "times": 1})
        with pytest.raises(Stopped) as stopped:
            made._pause(Restart(1, pause_s=60.0))
    assert stopped.value.number == signal.SIGTERM


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
