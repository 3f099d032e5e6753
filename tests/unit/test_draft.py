"""The run directory of ranks that another launcher has started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.conftest import only
from tests.unit.verdicts import plan
from training.cli import draft
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir, read_json, write_json
from training.host import process
from training.host.placement import NODE, RANK, Topology
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


class Started(Exception):
    """The process has become the launcher of a node."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The request of train.py as the second node of two, which gets no further than the launcher of
    its ranks."""
    made = SimpleNamespace(place=Topology(NODE, "platform", "", nnodes=2, node_rank=1))
    made.dry_run, made.check, made.resume_from = False, False, None
    made.starter, made.experiments = os.getpid(), tmp_path

    def write(
        plan: Any, _: Any, request: Any, ask: Any, starter: int, find: Any, begins: Any
    ) -> Any:
        assert starter == os.getpid()
        made.found = find(plan, request.experiments)
        made.asked = ask(plan, 1.0)
        begins()

    def become(*_: object) -> None:
        raise Started

    monkeypatch.setattr(draft.planner, "make", lambda *_: (made, plan(), []))
    monkeypatch.setattr(draft.continued_run, "of_plan", lambda *found, resumed: (*found, resumed))
    monkeypatch.setattr(draft.rendezvous, "ask", lambda *_: ("run", "launch", "token"))
    monkeypatch.setattr(draft.writer, "write", write)
    monkeypatch.setattr(draft.writer, "become_launcher", become)
    return made


def test_a_node_looks_for_a_run_that_continues_without_it(node: SimpleNamespace) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(Started):
            draft.draft([], {}, os.getppid())
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert node.found == (plan(), node.experiments, None)
    assert node.asked == ("run", "launch", "token")
    assert held >= set(process.STOP_SIGNALS), "they wait for the launcher"


def test_a_node_that_is_stopped_while_it_looks_has_no_traceback(
    node: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise process.StopAsked(signal.SIGTERM)

    monkeypatch.setattr(draft.continued_run, "of_plan", stopped)
    assert draft.draft([], {}, os.getppid()) == Exit.PREEMPTED


@pytest.mark.usefixtures("handlers")
def test_a_node_that_is_stopped_while_it_waits_for_node_0(
    node: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it would end silently"))
    monkeypatch.setattr(draft.rendezvous, "ask", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert draft.draft([], {}, os.getppid()) == Exit.PREEMPTED


def test_a_machine_with_its_own_disk_has_a_copy_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, planned = RunDir(tmp_path / "run"), plan()
    assert on_second_machine(run, planned, monkeypatch) == {**planned, "shared": False}
