"""A stop request to one machine while the machines decide which of them takes over ends all."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.conftest import wait_until
from tests.unit.test_launch_succession import Team, team
from training.launcher.peer_link import Stopped
from training.launcher.succession import Succession

__all__ = ["team"]  # fixture


class Deciding(threading.Thread):
    """One machine that decides; `stopped`: why it ends."""

    def __init__(self, succession: Succession) -> None:
        super().__init__()
        self._succession, self.stopped = succession, (0, -1)
        self.start()

    def run(self) -> None:
        try:
            self._succession.next_line()
        except Stopped as asked:
            assert asked.node is not None
            self.stopped = asked.number, asked.node


def test_the_machine_that_would_take_over_is_stopped(team: Team) -> None:
    team.first.__exit__()
    team.peers[1].forget(0)
    waits = Deciding(team.succession(2))
    wait_until(lambda: team.peers[1].greet() or team.peers[1].followers)
    team.peers[1].stop(signal.SIGTERM)
    team.peers[1].__exit__()
    waits.join(20)
    assert waits.stopped == (signal.SIGTERM, 1)


def test_a_machine_that_waits_for_another_is_stopped(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.first.__exit__()
    for peer in team.peers.values():
        peer.forget(0)
    waits = team.succession(2)
    monkeypatch.setattr(waits, "_greet", signalled)
    with pytest.raises(KeyboardInterrupt):
        waits.next_line()
    team.peers[2].stop(signal.SIGTERM)
    team.peers[2].__exit__()
    leads = Deciding(team.succession(1))  # later: it takes over at once when all have followed
    leads.join(20)
    assert leads.stopped == (signal.SIGTERM, 2)
    assert not team.runs[1].claim("abc", 2).exists()


def signalled() -> None:
    raise KeyboardInterrupt


def test_a_machine_that_has_lost_the_coordinator_alone_stops_alone(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = team.succession(2)
    monkeypatch.setattr(waits, "_leader", lambda: "dead")
    monkeypatch.setattr(waits, "_greet", signalled)
    with pytest.raises(KeyboardInterrupt):
        waits.next_line()
    team.peers[2].stop(signal.SIGTERM)
    wait_until(lambda: team.peers[1].greet() or team.peers[1].followers)
    team.peers[2].__exit__()
    wait_until(lambda: team.peers[1].greet() or not team.peers[1].followers)
    assert team.peers[1].asked is None
