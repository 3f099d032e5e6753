"""The machine that coordinates a run is lost: which of the others continues it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK, plan
from training.core import cause_ids, manifest, standing
from training.core.errors import Exit
from training.core.failure_kinds import GONE
from training.core.rundir import RunDir, write_json
from training.launcher import leadership, restart, succession
from training.launcher.coordinator import Coordinator
from training.launcher.json_socket import JsonSocket
from training.launcher.leader import Leader
from training.launcher.local_ranks import free_port
from training.launcher.machine import Launch
from training.launcher.outcome import Outcome
from training.launcher.peer import Peer
from training.launcher.peer_link import LostPeer
from training.launcher.succession import Succession
from training.launcher.waiting import Waiting
from training.monitor.state import RunWatch

NODES = 3
ELASTIC = {
    **{"per_node": 1, "ranks": NODES, "min_ranks": 1, "seats": [0, 1, 2], "lost": []},
    **{"rejoined": [], "device_batch_size": None, "gpus": [], "bindings": []},
}


def machine(node: int, port: int, folder: Path, *, shared: bool) -> dict[str, Any]:
    own = folder / ("disk" if shared or not node else f"disk{node}") / "a_run"
    own.mkdir(parents=True, exist_ok=True)
    made = plan(node, port, NODES, min_ranks=1) | {"elastic": dict(ELASTIC), "ranks": NODES}
    return made | {"shared": shared, "run_dir": str(own), "local_ranks": 1, "script": {"args": []}}


class Team:
    """Three machines that have started their ranks."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self.alone: dict[int, str] = {}
        self.port = free_port(LOOPBACK)
        self.plans = [machine(n, self.port, folder, shared=shared) for n in range(NODES)]
        self.runs = [RunDir(own["run_dir"], n or None) for n, own in enumerate(self.plans)]
        self.runs[0].token(self.plans[0]["launch"]).touch()
        self.first = Coordinator(self.plans[0])  # type: ignore[arg-type]
        self.peers = {n: Peer(self.plans[n]) for n in (1, 2)}  # type: ignore[arg-type]
        threads = [
            threading.Thread(target=self._begin, args=[peer]) for peer in self.peers.values()
        ]
        for thread in threads:
            thread.start()
        self.first.gather(10)
        self.first.go()
        for thread in threads:
            thread.join(10)

    def _begin(self, peer: Peer) -> None:
        peer.gather(10)
        peer.go()

    def succession(self, node: int) -> Succession:
        lost = LostPeer(0, GONE, cause_ids.PEER_DIED, "")
        return Succession(self.runs[node], self.plans[node], self.peers[node], lost, 2)  # type: ignore[arg-type]

    def decide(self, *nodes: int) -> dict[int, Coordinator | Peer | None]:
        found: dict[int, Coordinator | Peer | None] = {}

        def work(node: int) -> None:
            succession = self.succession(node)
            found[node] = succession.next_line()
            self.alone[node] = succession.alone
            if found[node] is None:  # its process ends
                self.peers[node].__exit__()

        threads = [threading.Thread(target=work, args=[node]) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def close(self) -> None:
        for line in (self.first, *self.peers.values()):
            line.__exit__()


@pytest.fixture(params=[True, False], ids=["shared", "own"])
def team(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Team]:
    monkeypatch.setattr(succession, "GATHER_S", 3.0)
    monkeypatch.setattr(succession, "HOLD_S", 1.0)
    monkeypatch.setattr(succession, "FOLLOW_S", 8.0)
    made = Team(tmp_path, shared=request.param)
    yield made
    made.close()


@contextmanager
def answering(*lines: Coordinator | Peer) -> Iterator[None]:
    """Machines whose ranks run."""
    stop = threading.Event()

    def greet() -> None:
        while not stop.wait(0.05):
            for line in lines:
                line.greet_late() if isinstance(line, Coordinator) else line.greet()

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_the_lowest_machine_takes_over_and_the_others_follow(team: Team) -> None:
    assert sorted(team.peers[2].machines) == [0, 1]
    team.first.__exit__()
    found = team.decide(1, 2)
    leader, follower = found[1], found[2]
    assert isinstance(leader, Coordinator) and follower is team.peers[2]
    assert (leader.place.leader, leader.missing(), leader.there(2)) == (1, [0], True)
    assert team.plans[2]["place"]["leader"] == 1 and follower.there(1)
    assert team.plans[2]["shared"] is (team.runs[1].path == team.runs[2].path)
    leader.send_all({"again": {"changes": {}}})
    assert follower.decide(None) == {"changes": {}}
    leader.__exit__()


def test_the_next_machine_takes_over_when_the_lowest_is_lost_too(team: Team) -> None:
    team.first.__exit__()
    team.peers[1].__exit__()
    found = team.decide(2)[2]
    assert isinstance(found, Coordinator)
    assert (found.place.leader, found.missing()) == (2, [0, 1])
    found.__exit__()


def test_a_machine_that_has_stopped_waiting_does_not_follow(team: Team) -> None:
    """Node 2 alone has lost node 0, waits for node 1 and gives up; hours later node 0 is lost."""
    wire = JsonSocket(socket.create_connection(team.peers[2].machines[1]))
    wire.send(team.succession(2)._hello("follow"))
    wait_until(lambda: team.peers[1].greet() or team.peers[1].followers)
    wire.close()
    wait_until(lambda: team.peers[1].greet() or not team.peers[1].followers)


def test_the_machine_with_the_newest_copy_takes_over(tmp_path: Path) -> None:
    team = Team(tmp_path, shared=False)
    for node, step in ((1, 100), (2, 5000)):  # node 1 was away
        del team.plans[node]["script"]
        team.runs[node].own.mkdir()
        copy = {"launch": "abc", "checkpoint": manifest.folder_name(step)}
        write_json(team.runs[node].replica, copy)
    team.first.__exit__()
    found = team.decide(1, 2)
    assert found[1] is None and isinstance(found[2], Coordinator)
    assert team.alone == {1: "", 2: ""}, "node 2 decides"
    found[2].__exit__()
    team.close()


def test_nothing_changes_while_the_first_machine_coordinates(team: Team) -> None:
    with answering(team.first):
        assert team.decide(1, 2) == {1: None, 2: None}
        assert team.alone == {1: "", 2: ""}, "it is known who continues"


def test_a_machine_cut_off_alone_does_not_take_over(team: Team) -> None:
    """Node 0 accepts connections and does not answer, node 1 neither."""
    found = team.decide(2)[2]
    shared = team.plans[2]["shared"]
    assert found is None
    # on a common disk the first to claim the start decides, and node 2 asks node 1 before
    assert not team.runs[2].claim("abc", 2).exists() or shared


@pytest.mark.parametrize("shared", [True, False])
def test_half_of_the_machines_continue_only_with_the_one_that_coordinates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Node 1 is dead, node 0 frozen: on its own disk node 2 must not continue."""
    monkeypatch.setattr(succession, "GATHER_S", 1.0)
    monkeypatch.setattr(succession, "HOLD_S", 1.0)
    team = Team(tmp_path, shared=shared)
    team.peers[1].__exit__()
    found = team.decide(2)[2]
    assert isinstance(found, Coordinator) if shared else found is None
    assert bool(team.alone[2]) is not shared, "perhaps the run has ended"
    if found:
        assert leadership.superseded(team.runs[0], team.plans[0], 2), "node 0 must end"  # type: ignore[arg-type]
        assert not leadership.claim(team.runs[0], team.plans[0], 2)  # type: ignore[arg-type]
        found.__exit__()
    team.close()


@pytest.mark.parametrize("claimed", [False, True])
def test_a_coordinator_that_is_lost_before_its_announced_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """It lost its power in the pause before a restart: nothing refuses a connection."""
    for name in ("GATHER_S", "HOLD_S"):
        monkeypatch.setattr(succession, name, 1.0)
    monkeypatch.setattr(leadership, "ANNOUNCED_S", 2.0)
    team = Team(tmp_path, shared=True)
    leadership.announce(team.runs[0], team.plans[0], 2)  # type: ignore[arg-type]
    assert leadership.awaited(team.runs[1], team.plans[1], 2, ())  # type: ignore[arg-type]
    assert not leadership.awaited(team.runs[1], team.plans[1], 2, {0})  # type: ignore[arg-type]
    if claimed:
        assert leadership.claim(team.runs[0], team.plans[0], 2)  # type: ignore[arg-type]
    found = team.decide(1, 2)
    assert isinstance(found[1], Coordinator) is not claimed
    assert (found[2] is team.peers[2]) is not claimed
    if found[1]:
        found[1].__exit__()
    team.close()


def test_a_run_that_has_ended_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side of a cut cable has claimed the next start, and finished, before this one."""
    for name in ("GATHER_S", "HOLD_S"):
        monkeypatch.setattr(succession, name, 0.1)
    team = Team(tmp_path, shared=True)
    run, launch = team.runs[0], team.plans[0]["launch"]
    assert leadership.claim(run, team.plans[0], 2)  # type: ignore[arg-type]
    run.remove_tokens(launch)
    assert team.decide(1)[1] is None and not team.alone[1]
    assert not list(run.path.glob(".launch-*"))
    team.close()


def test_a_claim_belongs_to_one_machine(tmp_path: Path) -> None:
    run, plans = RunDir(tmp_path), [plan(node, 1) for node in range(2)]
    assert leadership.claim(run, plans[1], 2)  # type: ignore[arg-type]
    assert leadership.claim(run, plans[1], 2), "claimed again"  # type: ignore[arg-type]
    assert not leadership.claim(run, plans[0], 2)  # type: ignore[arg-type]
    assert leadership.superseded(run, plans[0], 2)  # type: ignore[arg-type]
    assert leadership.claim(run, plans[0], 3)  # type: ignore[arg-type]
    assert leadership.claim(run, plans[1], 3, dead={0}), "its machine was lost after its claim"  # type: ignore[arg-type]
    assert leadership.superseded(run, plans[0], 3)  # type: ignore[arg-type]
    with pytest.raises(OSError):
        leadership.claim(RunDir(tmp_path / "missing"), plans[0], 4)  # type: ignore[arg-type]
    run.remove_tokens("abc")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("side", "alive", "leader", "expected"),
    [
        ([1, 2], [0, 1, 2], 0, True),
        ([0], [0, 1, 2], 0, False),
        ([0, 1], [0, 1, 2, 3], 0, True),
        ([2, 3], [0, 1, 2, 3], 0, False),
        ([1], [1], 0, True),
    ],
)
def test_majority(side: list[int], alive: list[int], leader: int, expected: bool) -> None:
    assert leadership.has_majority(side, alive, leader) is expected


def test_a_port_at_which_nothing_listens_is_a_dead_supervisor() -> None:
    assert leadership.ask((LOOPBACK, free_port(LOOPBACK)), {})[0] == "dead"
    with socket.create_server((LOOPBACK, 0)) as silent:
        assert leadership.ask(silent.getsockname(), {})[0] == "silent"


@pytest.mark.parametrize("resized", [True, False], ids=["resized", "ended_before"])
def test_the_others_learn_how_ranks_that_were_to_be_more_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resized: bool
) -> None:
    """Scripts start again whatever they exit with; a run that ended before they were asked ends."""
    team = Team(tmp_path, shared=True)
    decided: list[Any] = []
    made = Leader(Launch(team.runs[0], team.plans[0], None, ""), team.first)  # type: ignore[arg-type]
    made._more = restart.Team((0, 1, 2), back=(2,))
    monkeypatch.setattr(team.first, "decide", decided.append)
    monkeypatch.setattr(made.launch.recovery, "grow", lambda *_: True)
    outcome = Outcome(ours=False, resized=resized, ended=[(0, 75)])
    assert made._grows(outcome, 75) is (True if resized else None)
    assert [bool(order) for order in decided] == [resized]
    team.close()


def test_files_of_ranks_that_another_machine_has_now_are_removed(tmp_path: Path) -> None:
    team = Team(tmp_path, shared=False)
    team.first.shares = {1: False, 2: True}
    made = Leader(Launch(team.runs[0], team.plans[0], None, ""), team.first)  # type: ignore[arg-type]
    team.runs[0].create()
    for rank in range(NODES):
        write_json(team.runs[0].rank_error(rank), {})
    made._remove_moved()
    left = [team.runs[0].rank_error(rank).exists() for rank in range(NODES)]
    assert left == [True, False, True]
    team.close()


def test_a_machine_that_was_left_out_counts_until_the_others_have_started(tmp_path: Path) -> None:
    """Packets from node 0 are lost: it loses the others one by one, and they continue together."""
    team = Team(tmp_path, shared=False)
    line = team.first
    line.shares = {1: False, 2: False}
    leader = Leader(Launch(team.runs[0], team.plans[0], None, ""), line)  # type: ignore[arg-type]
    line.decide({"team": {"lost": [{"seat": 1}]}})
    assert line.members == {2} and not leader._too_few()
    line.lost(2)  # before it was ready
    assert leader._too_few()
    team.close()


def test_a_run_that_waits_for_a_machine_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alert DuetRunFailed must not fire in a wait, which may take --rendezvous_timeout."""
    team = Team(tmp_path, shared=True)
    run, created = team.runs[0], time.time()
    team.plans[0]["created"] = created
    write_json(run.plan, team.plans[0])
    write_json(run.supervisor, {**standing.identity(os.getpid()), "started": created + 1})
    ending: Any = SimpleNamespace(failure=None)
    leader = Leader(Launch(run, team.plans[0], ending, ""), team.first)  # type: ignore[arg-type]
    record: Any = {"cause": "peer_died", "kind": GONE, "rank": None, "summary": "", "time": created}
    record["exit_code"] = int(Exit.TRAINING)
    write_json(run.failure, record)
    states = [RunWatch(run).read(0.0)["run"]["state"]]

    def wait(*_: object) -> bool:
        states.append(RunWatch(run).read(0.0)["run"]["state"])
        return len(states) < 3  # the second wait is in vain

    monkeypatch.setattr(leader, "unless_asked", lambda work: work())
    monkeypatch.setattr(team.first, "await_machine", wait)
    assert leader._joined("too few", Waiting(), record)
    assert not leader._joined("too few", Waiting(), record)
    states.append(RunWatch(run).read(0.0)["run"]["state"])
    assert states == ["failed", "starting", "starting", "failed"]
    team.close()
