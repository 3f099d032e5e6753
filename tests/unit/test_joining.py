"""Ranks of another launcher that wait for each other: which ones are missing, and why."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.conftest import wait_until
from training.cli import joining
from training.cli.joining import EVERY_S, FIRST_S, RESOLVE_AFTER_S, Joining
from training.core.errors import Exit, UserError
from training.inspector import distributed


class Store(dict[str, str]):
    """As dist.Store."""

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= set(keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def add(self, key: str, more: int) -> int:
        self[key] = str(int(self.get(key, "0")) + more)
        return int(self[key])

    def compare_set(self, key: str, _: str, wanted: str) -> bytes:
        return self.setdefault(key, wanted).encode()


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(joining, "time", made)
    return made


@pytest.fixture
def warnings(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    monkeypatch.setattr(joining.log, "warning", lambda text: found.append((clock.now, text)))
    return found


def rank(number: int, *, reports: bool = True) -> Joining:
    return Joining("node-a", 29500, number, 4, 100.0, reports)


def code(wait: Callable[..., object], *args: Any) -> tuple[str, str, bool]:
    """Code and text of the error, and whether another rank reports it."""
    with pytest.raises(UserError) as caught:
        wait(*args)
    (problem,) = caught.value.problems
    assert caught.value.code == Exit.RESOURCES
    return problem.code, problem.what, caught.value.said_by_another


def test_missing_ranks_are_reported_once_and_named(
    clock: Clock, warnings: list[tuple[float, str]]
) -> None:
    store = cast("Any", Store({"joining/present/2": ""}))
    first, second = rank(0), rank(2)
    found, text, silent = code(first.wait_for_all, store)
    assert (found, silent) == ("ranks.missing", False)
    assert "rank 1, 3 of 4" in text and "node-a:29500" in text and "100 s" in text
    assert [round(at) for at, _ in warnings] == [FIRST_S, FIRST_S + EVERY_S]
    assert all("rank 1, 3 of 4" in text for _, text in warnings)
    clock.now = FIRST_S + 1  # this rank began later: rank 0 has reported already
    assert code(second.wait_for_all, store) == (found, text, True)
    assert len(warnings) == 2


def test_ranks_that_are_all_there(warnings: list[tuple[float, str]]) -> None:
    store = cast("Any", Store({f"joining/present/{other}": "" for other in (0, 1, 2)}))
    rank(3).wait_for_all(store)
    assert not warnings and "joining/present/3" in store


def test_an_address_that_resolves_late_or_never(
    clock: Clock, warnings: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    until = 12.0

    def lookup(*_: object, **__: object) -> None:
        if clock.now < until:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    rank(1).resolve()
    assert [at for at, _ in warnings] == [RESOLVE_AFTER_S]
    assert "MASTER_ADDR=node-a" in warnings[0][1]
    until = 1e9
    found, text, silent = code(rank(0, reports=False).resolve)
    assert (found, silent, len(warnings)) == ("ranks.address", False, 1)
    assert "MASTER_ADDR=node-a" in text and "Name or service not known" in text


def test_rank_0_that_does_not_answer(
    warnings: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    found, text, _ = code(rank(1).reach)
    assert found == "ranks.no_answer" and "node-a:29500" in text
    assert [at for at, _ in warnings] == [FIRST_S, FIRST_S + EVERY_S]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of torchrun's agent, which has one for all attempts."""
    limit = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


def opened(agent: dist.TCPStore, rank: int, *, waits: bool = True) -> dist.Store:
    limit = timedelta(seconds=5)
    return distributed._open_store("127.0.0.1", agent.port, rank, 2, limit, waits=waits)


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_torchrun_starts_again_do_not_read_what_the_first_ones_wrote(
    agent: dist.TCPStore, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        first, second = (opened(agent, rank, waits=waits) for rank in (0, 1))
        assert not second.check(["main/run"])
        first.set("main/run", attempt)
        assert second.get("main/run").decode() == attempt


def test_ranks_of_several_agents_meet_although_one_has_counted_another_restart(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent whose ranks have not failed starts them again without counting."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    first = opened(agent, 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    second = opened(agent, 1)
    first.set("main/run", "found")
    assert second.get("main/run").decode() == "found"


def test_ranks_of_several_agents_agree_on_a_name_of_each_attempt(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet in a store with the keys of the attempt before."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for attempt in ("0", "1", "2"):
        stores = [opened(agent, number, waits=False) for number in (0, 1, 2)]
        ways = [Joining("127.0.0.1", agent.port, number, 3, 30.0, True) for number in (0, 1, 2)]
        with ThreadPoolExecutor(3) as pool:
            # rank 0 last
            calls = [pool.submit(ways[n].wait_for_all, stores[n]) for n in (2, 1, 0)]
            third, second, first = (call.result() for call in calls)
        assert not third.check(["main/run"])
        first.set("main/run", attempt)
        assert second.get("main/run").decode() == third.get("main/run").decode() == attempt


def test_a_rank_that_waits_follows_rank_0_into_its_next_attempt(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a static rendezvous, other machines do not start their ranks again."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(joining, "ASK_S", 0.1)

    def waits(number: int) -> dist.Store:
        way = Joining("127.0.0.1", agent.port, number, 2, 30.0, True)
        return way.wait_for_all(opened(agent, number, waits=False))

    dead, store = joining.Naming(agent, 2), opened(agent, 0, waits=False)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(waits, 1)
        wait_until(lambda: store.check([f"{joining.ASKED}/1"]), 10, "rank 1 has asked")
        dead.answer()
        key = f"{dead.name}/{joining.PRESENT}/1"
        wait_until(lambda: store.check([key]), 10, "rank 1 waits in an attempt that has ended")
        first, second = pool.submit(waits, 0).result(), other.result()
    first.set("main/run", "found")
    assert second.get("main/run").decode() == "found"


@pytest.mark.parametrize("reports", [True, False])
def test_rank_0_that_does_not_name_the_attempt(
    clock: Clock,
    warnings: list[tuple[float, str]],
    monkeypatch: pytest.MonkeyPatch,
    reports: bool,
) -> None:
    """One rank of each machine reports it."""
    monkeypatch.setattr(distributed, "restarts_differ", lambda: True)
    way = replace(rank(1), reports=reports)
    with pytest.raises(UserError) as raised:
        way.wait_for_all(cast("Any", Store()))
    assert raised.value.said_by_another != reports
    (problem,) = raised.value.problems
    assert problem.code == "ranks.missing" and "rank 0 of 4" in problem.what
    assert [at for at, _ in warnings] == ([FIRST_S, FIRST_S + EVERY_S] if reports else [])
