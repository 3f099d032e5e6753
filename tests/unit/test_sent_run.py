"""The run that node 0 resumes, on a machine with a disk of its own."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.node_plans import LOOPBACK, plan
from tests.unit.test_launch_rendezvous import in_thread
from training.config.schema import Config
from training.core import manifest
from training.core.errors import Exit, Problem, UserError
from training.core.rundir import RunDir, is_name, read_json, write_json
from training.host import hosts
from training.host.placement import LOCAL, NODE, RANK, Topology
from training.launcher import coordinator, peer, rendezvous, resumed_run
from training.launcher.local_ranks import free_port
from training.plan import request, sent_run
from training.plan.cli_args import QUICKSTART

SECOND = Topology(NODE, "flags", "", nnodes=2, node_rank=1, master_addr="a")


def saved(run: RunDir, step: int) -> None:
    folder = run.checkpoints / manifest.folder_name(step)
    folder.mkdir(parents=True)
    numbers = {"step": step, "epoch": 0, "used": 8 * step, "world_size": 2, "bytes": 3}
    texts: dict[str, Any] = {"optimizer": "muon", "tokenizer": "bytes", "sha256": "ab"}
    manifest.write(folder, {**numbers, **texts, "shape": {}, "data": {}})  # type: ignore[typeddict-item]


@pytest.fixture
def first(tmp_path: Path) -> RunDir:
    """Node 0's run, which has begun to resume."""
    run = RunDir(tmp_path / "disk0" / "a_run")
    run.create()
    write_json(run.plan, {"config": {"seed": 9}})
    write_json(run.plan_before, {"config": {"seed": 7}, "variables": [{"name": "SECRET"}]})
    saved(run, 5)
    saved(run, 10)
    return run


def test_another_machine_gets_plan_and_manifest_and_ignores_its_own_checkpoints(
    first: RunDir, tmp_path: Path
) -> None:
    old = RunDir(tmp_path / "disk1" / "a_run", 1)
    old.create()
    saved(old, 40)
    port = free_port(LOOPBACK)
    head = plan(0, port) | {"run_dir": str(first.path), "resume": True}
    other = Topology(**plan(1, port)["place"])

    def member() -> Any:
        sent = rendezvous.ask_resumed(other, 10)
        own = plan(1, port) | {"shared": False}
        with peer.Peer(own) as line:  # type: ignore[arg-type]
            line.gather(10)
            line.go()
        return sent

    thread, out = in_thread(member)
    with coordinator.Coordinator(head) as line:  # type: ignore[arg-type]
        line.gather(10)
        line.go()
    thread.join(10)
    run = sent_run.keep(out[0], tmp_path / "disk1", 1)
    assert run and (run.name, run.path) == ("a_run", old.received)
    assert read_json(run.plan) == {"config": {"seed": 7}}, "of the last start, without variables"
    newest = manifest.newest(run.checkpoints)
    assert newest and newest == manifest.newest(first.checkpoints) and newest["step"] == 10
    assert len(manifest.all_in(old.checkpoints)) == 1, "its own are kept"
    sent_run.remove(run)
    assert not run.path.exists() and old.checkpoints.exists()


def test_a_new_run_of_node_0_has_nothing_to_send(first: RunDir) -> None:
    assert sent_run.of({"run_dir": str(first.path), "resume": False}) == {}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"run": "../up", "plan": {}},
        {"run": ".hidden", "plan": {}},
        {"run": "a_run", "plan": 1},
        {"run": 3, "plan": {}},
    ],
)
def test_an_unusable_message_writes_nothing(sent: dict[str, Any], tmp_path: Path) -> None:
    assert sent_run.keep(sent, tmp_path / "disk1", 1) is None
    assert not (tmp_path / "disk1").exists()


@pytest.mark.parametrize("facts", [None, 3, {"step": "x"}, {"step": 10}])
def test_an_invalid_manifest_counts_as_none(facts: object, tmp_path: Path) -> None:
    sent = json.loads(json.dumps({"run": "a_run", "plan": {}, "manifest": facts}))
    run = sent_run.keep(sent, tmp_path, 1)
    assert run and manifest.newest(run.checkpoints) is None


def test_the_manifest_of_an_early_version_with_a_bare_nan_stays_valid(
    first: RunDir, tmp_path: Path
) -> None:
    file = first.checkpoints / manifest.folder_name(10) / manifest.NAME
    facts = json.loads(file.read_text()) | {"data": {"mean": math.nan}}
    del facts["own_sha256"]
    text = json.dumps(facts, sort_keys=True)
    own = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(facts | {"own_sha256": own}))
    plan: Any = {"run_dir": str(first.path), "resume": True}
    sent = json.loads(json.dumps(sent_run.of(plan)))
    run = sent_run.keep(sent, tmp_path, 1)
    assert run and manifest.newest_step(run.checkpoints) == 10
    sent["manifest"]["used"] += 1
    run = sent_run.keep(sent, tmp_path, 1)
    assert run and manifest.newest_step(run.checkpoints) == 0, "changed on its way"


def test_only_a_machine_other_than_the_first_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Topology] = []
    monkeypatch.setattr(rendezvous, "ask_resumed", lambda place, seconds: asked.append(place) or {})
    config = Config(resume="a_run")
    for first in (
        Topology(LOCAL, "", ""),
        Topology(NODE, "flags", "", nnodes=2),
        Topology(NODE, hosts.HEAD, "", nnodes=2, node_rank=1),
        Topology(RANK, "mpi", "", rank=1, world_size=2),
    ):
        assert resumed_run.Received()(first, config, tmp_path) is None
    assert not asked
    received = resumed_run.Received()
    assert not any(received(SECOND, config, tmp_path) for _ in range(2))
    assert asked == [SECOND], "once"
    with pytest.raises(resumed_run.NotInstalled):
        resumed_run.Received(installed=False)(SECOND, config, tmp_path)


@pytest.mark.parametrize(
    ("script", "gpus", "kind"),
    [("train.py", 1, RANK), ("train.py", 2, NODE), ("train_dual_gpu.sh", 0, NODE)],
)
def test_a_resumed_run_is_asked_for_in_the_role_of_the_start(
    script: str, gpus: int, kind: str, tmp_path: Path
) -> None:
    """train.py is a node only where it starts several ranks."""
    roles = []

    def received(place: Topology, config: Config, experiments: Path) -> None:
        roles.append(place.kind)

    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    mpi = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(names, "1201", strict=True)}
    args = [QUICKSTART, "--resume=a_run", f"--out_dir={tmp_path}"]
    with pytest.raises(UserError):  # the run does not exist
        request.read(script, args, mpi | {"MASTER_ADDR": "a"}, gpus=gpus, received=received)
    assert set(roles) == {kind}


def test_a_finished_run_on_this_disk_limits_the_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Node 0 has nothing to do, and does not listen, if it sees the same run."""
    waits: list[float] = []

    def ask(place: Topology, seconds: float) -> Any:
        waits.append(seconds)
        raise UserError(Problem("nodes.no_answer", ""), Exit.RESOURCES)

    monkeypatch.setattr(rendezvous, "ask_resumed", ask)
    config = Config(resume="a_run")
    with pytest.raises(UserError):
        resumed_run.Received()(SECOND, config, tmp_path)
    (tmp_path / "a_run").mkdir()
    write_json(RunDir(tmp_path / "a_run").summary, {"status": "done", "steps": 12})
    assert resumed_run.Received()(SECOND, config, tmp_path) is None
    assert waits == [config.rendezvous_timeout, resumed_run.DONE_S]


def test_a_full_disk_is_reported_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sent = {"run": "a_run", "plan": {"config": {}}, "manifest": {"step": 5}}
    monkeypatch.setattr(rendezvous, "ask_resumed", lambda place, seconds: sent)
    monkeypatch.setattr(sent_run.rundir, "write_json", full)
    with pytest.raises(UserError) as caught:
        resumed_run.Received()(SECOND, Config(resume="a_run"), tmp_path)
    assert (caught.value.code, caught.value.problems[0].code) == (
        Exit.RESOURCES,
        "output.unwritable",
    )
    assert not list(tmp_path.iterdir())


def test_names_from_a_network_stay_inside_their_folder() -> None:
    assert [
        name for name in ("run_1", "a-b.c", "", ".x", "a/b", "a\n", None, 3) if is_name(name)
    ] == [
        "run_1",
        "a-b.c",
    ]
