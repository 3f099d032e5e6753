"""Data of ranks without a supervisor, on several machines: who prepares them, and who waits."""

from __future__ import annotations

import os
import threading
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
from training.core.rundir import RunDir
from training.data.prepared_corpus import PreparedCorpus
from training.inspector.distributed import World
from training.trainer import prepared_cache, rank_data

Write = Callable[..., str]
Prepared = PreparedCorpus | None


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


def prepared(run: RunDir, asked: dict[str, Any], rank: int, local: int, size: int = 4) -> Prepared:
    world = World(rank, local, size, torch.device("cpu"), "gloo", "-")
    return rank_data.prepared(run, cast(Plan, asked), world, supervised=False)


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
        found[rank] = prepared(run, asked, rank, local[rank])

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
    first = prepared_cache.prepare(run, cast(Plan, asked), tmp_path / "cache")
    Path(first.folder).rename(tmp_path / "of rank 0")
    published = run.data.read_bytes()
    prepare_in(tmp_path / "cache1", monkeypatch)
    for rank in range(4):
        store.set(f"{rank_data.READY}/{rank}", "")
    found = []
    for rank in (2, 3):
        os.environ[prepared_cache.OWN] = ""
        found.append(prepared(run, asked, rank, rank - 2))
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
        data: Future[Prepared] = pool.submit(prepared, run, asked, 0, 0, 2)
        wait_until(lambda: store.check([f"{rank_data.READY}/0"]), 30, "rank 0 has its data")
        assert not data.done()
        store.set(f"{rank_data.READY}/1", "")
        assert data.result() == prepared_cache.published(run)
