"""Copies of checkpoints and records for a machine with a disk of its own."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cases import each
from tests.unit.replica.conftest import (
    BLOCK,
    LAUNCH,
    LOOPBACK,
    SECRET,
    copy,
    same,
    saved,
    stepped,
    steps,
)
from training.core import checkpoint_folder, manifest
from training.core.jsonl import Record
from training.core.rundir import RunDir, read_records
from training.launcher.replica import receive_program, records, send_program, store
from training.launcher.replica.link import Link, LinkError
from training.launcher.replica.receiver import ReplicaReceiver, copied
from training.launcher.replica.store import Invalid, NoSpace, Store


def test_a_copy_is_identical_and_the_next_sends_only_what_is_new(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver
) -> None:
    second.event("warning", code="warning.slow_rank", text="of this machine")
    own = second.events.read_bytes()
    size = sum(path.stat().st_size for path in first.path.rglob("*") if path.is_file())
    size -= (first.checkpoints / "step_00000010" / manifest.NAME).stat().st_size
    assert copied(second, LAUNCH) == ""
    assert copy(first, receiver) == {"steps": [10], "bytes": size}
    assert same(first, second, 10) and copied(second, LAUNCH) == "step_00000010"
    name = first.tensorboard.name
    for path in (first.metrics.name, f"{name}/events.out.tfevents.1.a.2.0"):
        assert (first.path / path).read_bytes() == (second.path / path).read_bytes()
    assert second.events.read_bytes() == own + first.events.read_bytes()
    assert copy(first, receiver) == {"steps": [10], "bytes": 0}

    before = first.metrics.stat().st_size, first.events.stat().st_size
    stepped(first, 11, 20)
    first.event("checkpoint", step=20, path="here")
    first.metrics.open("a").write('{"step": 21')  # being written
    saved(first, 20, 100)
    new = first.metrics.stat().st_size - len('{"step": 21') - before[0]
    new += first.events.stat().st_size - before[1] + 100
    first.summary.write_text("{}")
    assert copy(first, receiver) == {"steps": [20], "bytes": new}
    assert second.events.read_bytes() == own + first.events.read_bytes()
    assert [r["step"] for r in read_records(second.metrics)] == list(range(1, 21))
    assert steps(second) == [10, 20] and not second.summary.exists()
    assert copy(first, receiver, last=True) == {"steps": [20], "bytes": 2}
    assert second.summary.exists()
    assert not list(second.checkpoints.glob(".*")) and not second.replaced.exists()


def test_checkpoints_that_node_0_deletes_are_deleted_after_the_newer_one_is_there(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver
) -> None:
    assert copy(first, receiver)["steps"] == [10]
    first.checkpoints.joinpath("step_00000010").rename(first.path / "gone")
    state = saved(first, 20) / manifest.STATE
    content = state.read_bytes()
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert copy(first, receiver)["error"] == receive_program.INVALID
    assert steps(second) == [10] and not list(second.checkpoints.glob(".*"))
    assert copied(second, LAUNCH) == "step_00000010"
    state.write_bytes(content)
    assert copy(first, receiver)["steps"] == [20]
    assert steps(second) == [20] and same(first, second, 20)


def test_a_checkpoint_that_the_run_deletes_for_a_newer_one_is_skipped(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = records.names

    def replaced(run: RunDir, *, last: bool) -> list[str]:
        if steps(first) == [10]:
            stepped(first, 11, 20)
            saved(first, 20)
            checkpoint_folder.remove(first.checkpoints / manifest.folder_name(10))
        return names(run, last=last)

    monkeypatch.setattr(records, "names", replaced)
    assert copy(first, receiver)["steps"] == [20]
    assert steps(second) == [20] and same(first, second, 20)
    assert second.metrics.read_bytes() == first.metrics.read_bytes()

    (first.checkpoints / manifest.folder_name(20) / manifest.STATE).unlink()
    second.metrics.unlink()
    checkpoint_folder.remove(second.checkpoints / manifest.folder_name(20))
    assert copy(first, receiver)["error"] == send_program.SOURCE


def test_the_best_checkpoint_is_copied_too(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver
) -> None:
    saved(first, 15, score={"name": "val_bpb", "value": 1.0})
    saved(first, 20, score={"name": "val_bpb", "value": 2.0})
    assert copy(first, receiver, best=True)["steps"] == [20, 15]
    assert steps(second) == [15, 20] and same(first, second, 15)


def test_a_best_checkpoint_that_is_replaced_meanwhile_delays_nothing(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = saved(first, 15, score={"name": "val_bpb", "value": 1.0})
    saved(first, 20, score={"name": "val_bpb", "value": 2.0})
    send = send_program.Copy._checkpoint

    def sent(copy: send_program.Copy, path: Path, size: int) -> None:
        send(copy, path, size)
        if best.exists():
            checkpoint_folder.remove(best)
            saved(first, 30, score={"name": "val_bpb", "value": 0.5})

    monkeypatch.setattr(send_program.Copy, "_checkpoint", sent)
    assert copy(first, receiver, best=True)["steps"] == [20] and steps(second) == [20]
    assert copy(first, receiver, best=True)["steps"] == [30]


def test_a_cut_copy_is_continued(first: RunDir, second: RunDir, receiver: ReplicaReceiver) -> None:
    folder = saved(first, 20, 3 * BLOCK)
    content = (folder / manifest.STATE).read_bytes()
    with connected(receiver) as link:
        link.send({"launch": LAUNCH})
        link.receive()
        text = (folder / manifest.NAME).read_text()
        link.send({"checkpoint": folder.name, "manifest": text})
        assert link.receive() == {"at": 0}
        link.send_block(content[:BLOCK])
        link.send_block(content[BLOCK : 2 * BLOCK])
    size = sum(first.path.joinpath(n).stat().st_size for n in records.names(first, last=False))
    assert copy(first, receiver) == {"steps": [20], "bytes": size + BLOCK}
    assert same(first, second, 20) and not list(second.checkpoints.glob(".*"))


def connected(receiver: ReplicaReceiver, secret: str = SECRET) -> Link:
    there = socket.create_connection((LOOPBACK, receiver.port))
    return Link(there, secret.encode(), accepted=False)


def test_other_programs_are_refused_and_do_not_end_the_receiver(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver
) -> None:
    assert copy(first, receiver, secret="another")["error"] == "refused"
    assert copy(first, receiver, launch="other")["error"] == receive_program.OTHER_LAUNCH
    with socket.create_connection((LOOPBACK, receiver.port)) as there:
        there.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 1000)
    for message in ({}, {"files": "all"}, {"file": "../../x"}, {"checkpoint": "../step_00000001"}):
        with connected(receiver) as link:
            link.send({"launch": LAUNCH})
            assert link.receive() == {"ready": True}
            link.send(message)
            if "file" in message:
                link.send_block(b"x")
            assert link.receive()["error"] == receive_program.INVALID
    with connected(receiver) as link, pytest.raises(LinkError):
        link.send({"launch": LAUNCH})
        link.receive()
        link.send({"file": "metrics.jsonl", "at": 0, "sha256": ""})
        link.send_block(b"x" * (records.PART + 1))
        link.receive()
    assert list(second.path.rglob("*.jsonl")) == steps(second) == []
    assert copy(first, receiver)["steps"] == [10]


@each(
    "name",
    [
        "../x",
        "/etc/passwd",
        "plan.json",
        "ranks/rank0.log",
        "checkpoints/step_00000001/state.pt",
        "samples/../../x",
        "samples/.x",
        "samples//x",
        "tb_logger/a/b/c/d",
        "metrics.jsonl/",
        "samples/a\nb",
        "",
        None,
        5,
    ],
)
def test_only_known_names_are_written(name: object) -> None:
    assert records.path_of(RunDir("/run"), name) is None


def test_parts_that_do_not_fit_are_rejected(second: RunDir) -> None:
    here, good = Store(second, LAUNCH), hashlib.sha256(b"x\n").hexdigest()
    here.write("metrics.jsonl", 0, b"x\n", good)
    for name, at, checksum in (
        ("metrics.jsonl", 2, "wrong"),
        ("metrics.jsonl", 1, good),
        ("metrics.jsonl", -1, good),
        ("events.jsonl", 5, good),
        ("events.jsonl", "0", good),
    ):
        with pytest.raises(Invalid):
            here.write(name, at, b"x\n", checksum)
    assert second.metrics.read_bytes() == b"x\n" and not second.events.exists()


def test_a_manifest_is_verified_before_anything_is_received(second: RunDir, first: RunDir) -> None:
    here, text = (
        Store(second, LAUNCH),
        (first.checkpoints / "step_00000010/manifest.json").read_text(),
    )
    larger = json.dumps(json.loads(text) | {"bytes": 1})
    for name, found in (
        ("step_00000011", text),
        ("step_00000010", larger),
        ("step_00000010", "{"),
        ("step_1", text),
        ("../step_00000010", text),
        (".writing-x", text),
    ):
        with pytest.raises(Invalid):
            here.begin(name, found)
    one = here.begin("step_00000010", text)
    with one.opened() as file, pytest.raises(Invalid):
        while True:
            one.write(file, b"x" * BLOCK)
    assert one.at == BLOCK < one.size
    assert steps(second) == []


def test_files_of_another_training_are_kept_aside(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver
) -> None:
    stepped(second, 1, 50)
    second.event("checkpoint", step=50, path="there")
    old = (saved(second, 10) / manifest.STATE).read_bytes()
    saved(second, 50)
    second.plan.write_text("of this launch")
    second.plan_before.write_text("of the other training")
    done = copy(first, receiver)
    assert (done["steps"], done["aside"]) == ([10], "step_00000050")
    assert steps(second) == [10] and same(first, second, 10)
    assert second.metrics.read_bytes() == first.metrics.read_bytes()
    (aside,) = second.replaced.iterdir()
    kept = RunDir(aside)
    assert steps(kept) == [10, 50]
    assert kept.plan.read_text() == "of the other training"
    assert second.plan.read_text() == "of this launch"
    assert (kept.checkpoints / "step_00000010" / manifest.STATE).read_bytes() == old
    assert len(list(read_records(kept.metrics))) == 50 and kept.events.exists()


def test_no_space_is_reported_before_anything_is_written(
    first: RunDir, second: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (first.checkpoints / "step_00000010/manifest.json").read_text()
    size = json.loads(text)["bytes"]
    usage = SimpleNamespace(free=store.SPARE + size - 1)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpace) as full:
        Store(second, LAUNCH).begin("step_00000010", text)
    assert (full.value.needed, full.value.free) == (size, size - 1)
    assert not list(second.checkpoints.iterdir())


def test_a_small_disk_keeps_the_newest_copy_and_gets_the_next(
    first: RunDir, second: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (first.checkpoints / "step_00000010/manifest.json").read_text()
    size = json.loads(text)["bytes"]
    for step in (4, 6, 8):
        saved(second, step)
    (second.checkpoints / "step_00000008/manifest.json").write_text("")
    usage = lambda _: SimpleNamespace(free=store.SPARE + size - bool(8 in steps(second)))  # noqa: E731
    monkeypatch.setattr(store.shutil, "disk_usage", usage)
    Store(second, LAUNCH).begin("step_00000010", text)
    assert steps(second) == [6], "the newest one that is not damaged"


def test_a_best_checkpoint_that_made_room_is_copied_again(
    first: RunDir, second: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk for two checkpoints and a half."""
    usage = lambda _: SimpleNamespace(free=store.SPARE + (5 - 2 * len(steps(second))) * BLOCK)  # noqa: E731
    monkeypatch.setattr(store.shutil, "disk_usage", usage)
    for step, value in ((15, 1.0), (20, 2.0), (30, 3.0)):
        saved(first, step, size=2 * BLOCK, score={"name": "val_bpb", "value": value})
        last = served(first, second, best=True)
        assert last["steps"] == sorted({15, step}, reverse=True) and set(last["steps"]) <= set(
            steps(second)
        )


def served(first: RunDir, second: RunDir, *, best: bool = False) -> Record:
    """A copy whose receiver is in this process."""
    answers: list[Record] = []
    with socket.create_server((LOOPBACK, 0)) as listening:
        task: Record = {"run_dir": str(first.path), "address": LOOPBACK, "secret": SECRET}
        task |= {"port": listening.getsockname()[1], "launch": LAUNCH, "best": best, "last": False}
        thread = threading.Thread(target=lambda: answers.append(send_program.copied(task)))
        thread.start()
        here = Store(second, LAUNCH)
        receive_program.serve_until_closed(listening.accept()[0], here, SECRET.encode())
        thread.join()
    return answers[0]


@pytest.fixture
def small_disk(second: RunDir) -> Iterator[Path]:
    """The checkpoints of the second machine on 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(second.checkpoints)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield second.checkpoints
    subprocess.run(["umount", str(second.checkpoints)], check=True)


def test_a_disk_that_fills_up_keeps_the_older_copy(
    first: RunDir, second: RunDir, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SPARE", -(1 << 30))  # the space is taken while a copy is written
    answers = []
    for size in (1, 4):  # blocks
        saved(first, 10 + 10 * size, size * BLOCK)
        answers.append(served(first, second))
    assert answers[0]["steps"] == [20]
    assert answers[1] == {"error": receive_program.DISK, "text": os.strerror(errno.ENOSPC)}
    assert steps(second) == [20] and same(first, second, 20)
    assert [path.name for path in small_disk.iterdir()] == ["step_00000020"]


def test_a_long_verification_is_not_taken_for_a_stalled_one(
    first: RunDir, second: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_program, "ALIVE_S", 0.0)
    alive: list[Record] = []
    real = Link.send

    def noted(link: Link, message: Record) -> None:
        alive.extend([message] * ("alive" in message))
        real(link, message)

    monkeypatch.setattr(Link, "send", noted)
    assert served(first, second)["steps"] == [10]
    assert len(alive) == 2, "one for each piece that was read"
