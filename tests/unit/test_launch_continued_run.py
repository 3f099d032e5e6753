"""A run that continues without one of its machines, as that machine or a new one in its place finds
it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit.node_plans import LOOPBACK
from tests.unit.test_launch_succession import Team, answering, machine, team
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir, read_json, write_json
from training.host.placement import LOCAL, Topology
from training.launcher import continued_run, invitation, invited, leadership, live_run, rendezvous
from training.launcher.coordinator import Coordinator
from training.launcher.local_ranks import free_port
from training.launcher.peer import Peer

__all__ = ["team"]  # fixture


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an invitation that does not come."""
    monkeypatch.setattr(invited, "WAIT_S", 0.0)


def test_addresses_from_a_network_are_used_as_far_as_they_are_usable() -> None:
    place = Topology(LOCAL, "flags", "", nnodes=3, node_rank=0, master_addr=LOOPBACK)
    at = ["10.0.0.1", 5]
    for sent in (
        {"9" * 5000: at},  # int() refuses it
        {"3": at, "0": at, "-1": at, "x": at, "": at},
        {"1": []},
        {"1": ["a", 0]},
        {"1": [5, "a"]},
        {"1": "a"},
        [at],
        None,
    ):
        assert rendezvous.machines(sent, place) == {}, str(sent)[:40]
    assert rendezvous.machines({"1": at, "2": [*at, "more"]}, place) == {
        1: ("10.0.0.1", 5),
        2: ("10.0.0.1", 5),
    }


def test_a_machine_finds_the_run_that_continues_without_it(team: Team, tmp_path: Path) -> None:
    for node, line in team.peers.items():
        team.runs[node].own.mkdir()
        continued_run.keep(team.runs[node], line)
    team.first.__exit__()
    found = team.decide(1, 2)
    leader, follower = found[1], found[2]
    assert isinstance(leader, Coordinator) and isinstance(follower, Peer)
    with answering(leader, follower):
        # node 0 as it is started again, with what node 2 knew
        other = team.runs[2].path.parent
        place = continued_run.of_plan(machine(0, team.port, tmp_path, shared=True), other)  # type: ignore[arg-type]
        different = machine(0, team.port, tmp_path, shared=True)
        different["config"]["seed"] = 2
        none = continued_run.of_plan(different, other)  # type: ignore[arg-type]
        for file in other.glob("*/*/machines.json"):
            write_json(file, {**(read_json(file) or {}), "launch": "before"})
        stale = continued_run.of_plan(machine(0, team.port, tmp_path, shared=True), other)  # type: ignore[arg-type]
    leader.__exit__()
    assert place and (place.leader, place.master_port, place.leads) == (1, leader.port, False)
    assert none is None, "another training"
    assert stale is None, "another launch answers at the address of an old one"


def test_a_run_that_continues_elsewhere_is_not_resumed(
    team: Team, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 is lost, and another command resumes the run on one machine."""
    for node, line in {0: team.first, **team.peers}.items():
        team.runs[node].own.mkdir(exist_ok=True)
        continued_run.keep(team.runs[node], line)
    run = RunDir(team.runs[0].path)
    write_json(run.plan, team.plans[0])
    alone = machine(0, team.port, tmp_path, shared=True)
    alone["place"] |= {"kind": LOCAL, "nnodes": 1}
    team.first.__exit__()
    found = team.decide(1, 2)
    leader, follower = found[1], found[2]
    assert isinstance(leader, Coordinator) and isinstance(follower, Peer)
    own = RunDir(team.runs[2].path)  # on its own disk only node 2's file is there
    write_json(own.plan, team.plans[2])
    with answering(leader, follower):
        for resumed in (run, own):
            with pytest.raises(UserError) as refused:
                continued_run.of_plan(alone, tmp_path / "none", resumed)
            (problem,) = refused.value.problems
            assert (problem.code, refused.value.code) == ("run.live", Exit.RESOURCES)
            assert f"node 1 coordinates it at {LOOPBACK}:{leader.port}" in problem.what
            assert f"--master_addr={LOOPBACK} --master_port={leader.port}" in problem.fixes[0]
    leader.__exit__()
    follower.__exit__()
    capsys.readouterr()
    assert continued_run.of_plan(alone, tmp_path / "none", run) is None
    assert not capsys.readouterr().err, "every machine refuses the connection"
    monkeypatch.setattr(live_run, "BUSY_S", 0.0)
    with socket.create_server((LOOPBACK, team.port)):  # accepts, and does not answer
        assert continued_run.of_plan(alone, tmp_path / "none", run) is None
    assert (
        f"a_run may still be running on node 0 ({LOOPBACK}:{team.port})" in capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [0, 2])
def test_a_new_machine_joins_at_the_address_of_the_one_that_has_taken_over(
    team: Team, tmp_path: Path, number: int
) -> None:
    """Its disk knows nothing about the run."""
    team.first.__exit__()
    found = team.decide(1, 2)
    leader, follower = found[1], found[2]
    assert isinstance(leader, Coordinator) and isinstance(follower, Peer)
    new = machine(number, leader.port, tmp_path, shared=True)
    asked = live_run.join_flags(leader.place, number)
    assert (
        asked
        == f"--nnodes=3 --node_rank={number} --master_addr={LOOPBACK} --master_port={leader.port}"
    )
    if number:
        leader.lost(number)
    with answering(leader):
        place = continued_run.of_plan(new, tmp_path / "none")
        new["config"]["seed"] = 2
        assert continued_run.of_plan(new, tmp_path / "none") is None, "another training"
    leader.__exit__()
    assert place and (place.leader, place.master_port, place.leads) == (1, leader.port, False)


def test_a_machine_of_a_new_run_joins_node_0_as_usual(team: Team, tmp_path: Path) -> None:
    with answering(team.first):
        usual = machine(1, team.port, tmp_path, shared=True)
        assert continued_run.of_plan(usual, tmp_path / "none") is None


@pytest.mark.parametrize("joins", [False, True], ids=["by_hand", "by_hosts"])
def test_a_new_machine_in_place_of_node_0_is_invited(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """The same command as before, on an empty disk."""
    monkeypatch.setattr(invited, "WAIT_S", 20.0)
    monkeypatch.setattr(invitation, "EVERY_S", 0.1)
    monkeypatch.setenv(continued_run.JOINS, "1" if joins else "")
    team.first.__exit__()
    found = team.decide(1, 2)
    leader, follower = found[1], found[2]
    assert isinstance(leader, Coordinator) and isinstance(follower, Peer)
    new = machine(0, team.port, tmp_path, shared=True)
    with answering(leader):
        place = continued_run.of_plan(new, tmp_path / "none")
    assert place and (place.leader, place.master_port, place.leads) == (1, leader.port, False)
    new["config"]["seed"] = 2
    with answering(leader), pytest.raises(UserError) if joins else nullcontext():
        assert continued_run.of_plan(new, tmp_path / "none") is None, "another training"
    leader.__exit__()


def test_node_0_of_a_new_run_waits_for_the_first_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invited, "WAIT_S", 600.0)
    port = free_port(LOOPBACK)
    with ThreadPoolExecutor(1) as pool:
        first, other = (machine(n, port, tmp_path, shared=True) for n in (0, 1))
        monkeypatch.setattr(invited.process, "stoppable", nullcontext)  # of the main thread
        waits = pool.submit(continued_run.of_plan, first, tmp_path)
        hello = {"want": "leader"}
        wait_until(
            lambda: leadership.ask((LOOPBACK, port), hello)[1] == {"launch": "abc", "leader": 0}
        )
        assert not waits.done(), "the machines of an earlier run ask this too"
        assert continued_run.of_plan(other, tmp_path) is None
        leadership.ask((LOOPBACK, port), {"want": "run"})
        assert waits.result(10) is None
