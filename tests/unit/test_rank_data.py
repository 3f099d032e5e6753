"""Data of ranks without a supervisor, on several machines: who prepares them, and who waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.conftest import wait_until
from tests.unit.test_data_store import plan as of_data
from training.core.contracts.plan import Plan
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir
from training.data.prepared_corpus import PreparedCorpus
from training.inspector.distributed import World
from training.plan import writer
from training.trainer import prepared_cache, rank_data

Write = Callable[..., str]
Prepared = PreparedCorpus | None
LONG_S = 600.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(rank_data.heartbeat, "current", SimpleNamespace(beat=lambda _: None))
    monkeypatch.setenv(prepared_cache.OWN, "")
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.fixture
def asked(write: Write) -> dict[str, Any]:
    """The part of the plan of four ranks on two machines."""
    return of_data(write("a.txt", "some text" * 100)) | {
        "task": {"name": "gpt", "file": None},
        "place": {"kind": "rank", "node_rank": 0, "local_world_size": 2, "world_size": 4},
    }


def prepare_in(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = prepared_cache.prepare
    monkeypatch.setattr(prepared_cache, "prepare", lambda *of: prepare(*of, cache))


def prepare_elsewhere(run: RunDir, asked: dict[str, Any], folder: Path) -> None:
    """As rank 0, on a disk that the others do not have."""
    first = prepared_cache.prepare(run, cast(Plan, asked), folder / "cache")
    Path(first.folder).rename(folder / "of rank 0")


def world(rank: int, local: int = 0, size: int = 4) -> World:
    return World(rank, local, size, torch.device("cpu"), "gloo", "-")


def prepared(run: RunDir, asked: dict[str, Any], place: World) -> Prepared:
    return rank_data.prepared(run, cast(Plan, asked), place, supervised=False)


def waiting(rank: int, size: int = 4, limit_s: float = LONG_S) -> Future[None]:
    """A rank that has its data and waits for the others."""
    found: Future[None] = Future()

    def wait() -> None:
        try:
            rank_data.Peers(world(rank, size=size), limit_s).wait_for_all()
            found.set_result(None)
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return found


@pytest.mark.parametrize("local", [(0, 1, 0, 1), (0, 0, 1, 1)], ids=["block", "cyclic"])
def test_the_ranks_of_a_machine_need_not_follow_each_other(
    local: tuple[int, ...],
    run: RunDir,
    store: dist.Store,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_in(tmp_path / "cache", monkeypatch)
    found: dict[int, Prepared] = {}

    def train(rank: int) -> None:
        found[rank] = prepared(run, asked, world(rank, local[rank]))

    for rank in range(4):
        threading.Thread(target=train, args=(rank,), daemon=True).start()
    wait_until(lambda: len(found) == 4, 20, "all ranks have their data")
    assert {*map(str, found.values())} == {str(prepared_cache.published(run))}


def test_a_machine_without_the_folder_of_rank_0_prepares_the_text_itself(
    run: RunDir,
    store: dist.Store,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run directory is on a common disk, clones and prepared data are not."""
    prepare_elsewhere(run, asked, tmp_path)
    published = run.data.read_bytes()
    prepare_in(tmp_path / "cache1", monkeypatch)
    monkeypatch.setattr(rank_data.Peers, "wait_for_all", lambda self: None)
    found = []
    for rank in (2, 3):
        os.environ[prepared_cache.OWN] = ""
        found.append(prepared(run, asked, world(rank, rank - 2)))
    assert found[0] == found[1] and found[0]
    assert Path(found[0].folder).parent == tmp_path / "cache1"
    assert run.data.read_bytes() == published


def test_rank_0_waits_for_data_of_other_machines(
    run: RunDir,
    store: dist.Store,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collective would end with an error while another machine prepares its text."""
    prepare_in(tmp_path / "cache", monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        data = pool.submit(prepared, run, asked, world(0, size=2))
        wait_until(lambda: store.check([f"{rank_data.READY}/0"]), 30, "rank 0 has its data")
        assert not data.done()
        rank_data.Peers(world(1, size=2), LONG_S).wait_for_all()
        assert data.result() == prepared_cache.published(run)


def test_a_machine_whose_text_is_rejected_ends_the_others_with_its_code(
    run: RunDir,
    store: dist.Store,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_elsewhere(run, asked, tmp_path)
    others = [waiting(rank) for rank in (0, 1)]
    (tmp_path / "file").touch()
    prepare_in(tmp_path / "file" / "cache", monkeypatch)
    for own, rank in ((True, 2), (False, 3)):
        os.environ[prepared_cache.OWN] = ""
        with pytest.raises(UserError) as caught:
            prepared(run, asked, world(rank, rank - 2))
        assert caught.value.code == Exit.RESOURCES
        assert bool(caught.value.problems) is own is not caught.value.said_by_another
    errors = [other.exception(20) for other in others]
    assert [isinstance(error, UserError) and error.code for error in errors] == [3, 3]
    (problem,) = cast(UserError, errors[0]).problems
    assert problem.code == "data.unwritable" and "rank 2" in problem.what
    assert cast(UserError, errors[1]).said_by_another


def test_no_rank_trains_on_the_data_of_the_start_before(
    run: RunDir,
    store: dist.Store,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are restored when rank 0 rejects those of this start; rank 1 looks right then."""
    monkeypatch.setattr(rank_data, "REPORT_S", 0.0)
    prepared_cache.prepare(run, cast(Plan, asked), tmp_path / "cache")
    before = run.data.rename(run.data_before).read_bytes()
    run.plan_before.write_text("{}")
    rejected: dict[str, Any] = asked | {
        "config": {**asked["config"], "data": "missing.txt"},
        "place": {**asked["place"], "world_size": 2},
    }
    errors: list[UserError] = []

    def train(rank: int) -> None:
        with pytest.raises(UserError) as caught:
            prepared(run, rejected, world(rank, rank, size=2))
        errors.append(caught.value)

    def restored(run: RunDir) -> None:
        assert give_back(run) and run.data.read_bytes() == before
        train(1)

    give_back = writer.give_back
    monkeypatch.setattr(writer, "give_back", restored)
    train(0)
    assert [(one.code, one.said_by_another) for one in errors] == [(2, True), (2, False)]


def test_the_others_end_with_a_rank_that_fails(run: RunDir, store: dist.Store) -> None:
    other = waiting(0)
    with pytest.raises(ValueError), rank_data.Peers(world(2), LONG_S).preparing():
        raise ValueError("planted")
    error = other.exception(20)
    assert isinstance(error, rank_data.RankEnded) and error.rank == 2


def test_a_wait_is_limited_while_no_rank_that_prepares_data_lives(
    run: RunDir, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 2.0
    monkeypatch.setattr(rank_data, "ALIVE_S", limit_s / 10)
    other = waiting(0, 2, limit_s)
    with rank_data.Peers(world(1, size=2), limit_s).preparing():
        time.sleep(1.5 * limit_s)
        assert not other.done()
    error = other.exception(20)  # rank 1 is gone
    assert isinstance(error, rank_data.RankEnded) and error.rank == 1


def test_the_others_end_if_the_store_is_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> dist.Store:
        raise dist.DistNetworkError("planted")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", gone)
    error = waiting(1).exception(20)
    assert isinstance(error, rank_data.RankEnded) and error.rank == 0


def test_many_ranks_ask_the_store_less_often(
    run: RunDir, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for one key each."""
    size = 16 * rank_data.MANY
    asked: list[int] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        store.add(rank_data.COUNT, size - 1)

    def check(keys: list[str]) -> bool:
        asked.append(len(keys))
        return store.check(keys)

    seen = SimpleNamespace(set=store.set, add=store.add, get=store.get, check=check)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: seen)
    monkeypatch.setattr(rank_data.time, "sleep", sleep)
    rank_data.Peers(world(0, size=size), LONG_S).wait_for_all()
    assert slept == [16 * rank_data.POLL_S] and {*asked} == {1}
