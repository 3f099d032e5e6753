"""A run on node 0's disk, an empty one on node 1's, and copies between them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit import node_plans
from training.core import manifest
from training.core.jsonl import Record
from training.core.rundir import RunDir
from training.launcher.json_socket import JsonSocket
from training.launcher.replica import receive_program, send_program
from training.launcher.replica.receiver import ReplicaReceiver

LOOPBACK, SECRET, LAUNCH = node_plans.LOOPBACK, "a secret", "abc"
BLOCK = receive_program.BLOCK


def saved(run: RunDir, step: int, size: int = 3 * BLOCK // 2, **more: Any) -> Path:
    folder = run.checkpoints / manifest.folder_name(step)
    folder.mkdir(parents=True)
    content = os.urandom(size)
    (folder / manifest.STATE).write_bytes(content)
    facts: Record = {"step": step, "epoch": 0, "used": 8 * step, "world_size": 2, "bytes": size}
    facts |= {"optimizer": "muon", "tokenizer": "bytes", "shape": {}, "data": {}}
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    manifest.write(folder, {**facts, **more})  # type: ignore[typeddict-item]
    return folder


def stepped(run: RunDir, first: int, last: int) -> None:
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")


@pytest.fixture
def first(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "disk0" / "a_run")
    run.create()
    stepped(run, 1, 10)
    run.event("checkpoint", step=10, path="here")
    (run.tensorboard).mkdir()
    (run.tensorboard / "events.out.tfevents.1.a.2.0").write_bytes(b"\0\1\n\2")
    saved(run, 10)
    return run


@pytest.fixture
def second(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "disk1" / "a_run", 1)
    run.create()
    return run


def plan(node: int, **more: Any) -> Any:
    made = node_plans.plan(node, 0) | {"elastic": {}, "shared": node == 0}
    return made | more


@pytest.fixture
def lines() -> Iterator[tuple[Any, Any]]:
    """The connections of node 0 and node 1, as far as the copies need them."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        there = JsonSocket(socket.create_connection(listening.getsockname()))
        here = JsonSocket(listening.accept()[0])
    place = SimpleNamespace(leader=0)
    common = {"secret": SECRET, "name": "node {}".format, "place": place}
    yield (
        SimpleNamespace(wires={1: here}, replica_ports={}, **common),
        SimpleNamespace(wires={0: there}, replica_ports={}, read=lambda _: [], **common),
    )
    here.close()
    there.close()


@pytest.fixture
def receiver(second: RunDir, lines: tuple[Any, Any]) -> Iterator[ReplicaReceiver]:
    made = ReplicaReceiver(second, plan(1), lines[1])
    assert made.port
    lines[0].replica_ports[1] = made.port
    yield made
    made.close()


def copy(run: RunDir, receiver: ReplicaReceiver, **more: object) -> Record:
    task = {"run_dir": str(run.path), "address": LOOPBACK, "port": receiver.port}
    task |= {"secret": SECRET, "launch": LAUNCH, "best": False, "last": False}
    return send_program.copied({**task, **more})


def same(first: RunDir, second: RunDir, step: int) -> bool:
    name = manifest.folder_name(step)
    return all(
        (first.checkpoints / name / part).read_bytes()
        == (second.checkpoints / name / part).read_bytes()
        for part in (manifest.STATE, manifest.NAME)
    )


def steps(run: RunDir) -> list[int]:
    return [manifest.step_of(path) for path in manifest.all_in(run.checkpoints)]
