"""The run directory of ranks that another launcher has started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.conftest import only
from tests.unit.verdicts import plan
from training.cli import draft
from training.core.errors import UserError
from training.core.rundir import RunDir, read_json, write_json
from training.host.placement import RANK, Topology
from training.inspector import distributed
from training.inspector.distributed import World


def on_second_machine(
    run: RunDir, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The plan in the run directory after the first rank of the machine has joined."""
    told = json.dumps({"path": str(run.path), "plan": planned})
    monkeypatch.setattr(distributed, "from_main", lambda *_: told)
    monkeypatch.setattr(distributed, "barrier", lambda *_: None)
    world = World(1, 0, 2, torch.device("cpu"), "gloo", "-")
    assert draft._common_run(None, world).path == run.path
    return read_json(run.plan) or {}


def test_a_folder_that_an_nfs_client_remembers_as_missing_is_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again once it has made the folder."""
    run, planned, seen = RunDir(tmp_path / "run"), plan(), []
    run.create()
    write_json(run.plan, planned)
    run.token(planned["launch"]).touch()
    run.data.write_text("{}")
    exists, create = Path.exists, RunDir.create
    monkeypatch.setattr(Path, "exists", lambda path: bool(seen) and exists(path))
    monkeypatch.setattr(RunDir, "create", lambda own: seen.append(create(own)))
    assert on_second_machine(run, planned, monkeypatch) == planned
    assert seen and run.data.exists()


@pytest.mark.parametrize(("local", "silent"), [(0, False), (1, True)])
def test_the_first_rank_of_each_machine_names_missing_packages(
    local: int, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Topology(RANK, "torchrun", "", rank=2 + local, local_rank=local, world_size=4)
    request = SimpleNamespace(place=place, dry_run=False)
    monkeypatch.setattr(draft.planner, "make", lambda *_: (request, plan(), []))
    monkeypatch.setattr(draft.packages, "REQUIRED", {"no-such-package": ""})
    with pytest.raises(UserError) as caught:
        draft.draft([], {}, os.getppid())
    assert only(caught.value.problems).code == "package.missing"
    assert caught.value.said_by_another is silent


def test_a_machine_with_its_own_disk_has_a_copy_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, planned = RunDir(tmp_path / "run"), plan()
    assert on_second_machine(run, planned, monkeypatch) == {**planned, "shared": False}
