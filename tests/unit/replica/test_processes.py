"""When the supervisor copies checkpoints to a machine with a disk of its own, and its processes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.replica.conftest import (
    LOOPBACK,
    SECRET,
    copy,
    plan,
    same,
    saved,
    steps,
)
from training.core.errors import Exit
from training.core.rundir import RunDir, read_records
from training.launcher.replica.receiver import ReplicaReceiver
from training.launcher.replica.sender import ReplicaSender
from training.launcher.stop_signals import StopSignals


def looked(sender: ReplicaSender, what: Callable[[], object]) -> None:
    def look() -> object:
        sender._looked = 0.0
        sender.look()
        return what()

    wait_until(look, 120, "a copy")


def replicas(run: RunDir) -> list[int]:
    return [r["step"] for r in read_records(run.events) if r["event"] == "replica"]


def test_the_supervisor_copies_each_checkpoint(
    first: RunDir, second: RunDir, lines: tuple[Any, Any], receiver: ReplicaReceiver
) -> None:
    sender = ReplicaSender(first, plan(0), lines[0])
    looked(sender, lambda: replicas(first) == [10])
    saved(first, 20)
    looked(sender, lambda: replicas(first) == [10, 20])
    assert sender._copy is None and same(first, second, 20)
    pid = receiver._popen.pid if receiver._popen else 0
    assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    saved(first, 30)
    first.summary.write_text("{}")
    with StopSignals() as signals:
        sender.finish(Exit.TRAINING, signals)
        assert not second.summary.exists()
        sender.finish(Exit.DONE, signals)
    assert second.summary.exists() and same(first, second, 30)
    assert replicas(first) == [10, 20, 30]
    sender.close()


def test_failures_are_one_warning_and_are_tried_again(
    first: RunDir,
    second: RunDir,
    lines: tuple[Any, Any],
    receiver: ReplicaReceiver,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # one that has not started yet would be a failure of another kind
    wait_until(lambda: "steps" in copy(first, receiver), 120, "a receiver")
    sender = ReplicaSender(first, plan(0), lines[0])
    lines[0].secret = "another"
    looked(sender, lambda: sender._failed)
    saved(first, 20)
    looked(sender, lambda: sender._failed and sender._failed[1] == "step_00000020")
    (warning,) = (r for r in read_records(first.events) if r["event"] == "warning")
    assert warning["code"] == "warning.replica" and warning["by"] == "supervisor"
    assert capfd.readouterr().err.count(warning["text"]) == 1
    lines[0].secret = SECRET
    for _ in range(3):  # not at once
        sender._looked = 0.0
        sender.look()
    assert sender._copy is None
    saved(first, 30)
    looked(sender, lambda: replicas(first) == [30])
    assert steps(second) == [10, 30]
    sender.close()


def test_a_copy_to_a_lost_machine_is_ended(first: RunDir, lines: tuple[Any, Any]) -> None:
    with socket.create_server((LOOPBACK, 0)) as never_answers:
        lines[0].replica_ports[1] = never_answers.getsockname()[1]
        sender = ReplicaSender(first, plan(0), lines[0])
        sender.look()
        assert sender._copy, "it does not wait for the machine"
        pid = sender._copy.popen.pid
        lines[0].wires.clear()
        looked(sender, lambda: sender._copy is None)
    assert not Path(f"/proc/{pid}").exists()
    assert not [r for r in read_records(first.events) if r["event"] == "warning"]


def test_a_machine_that_waits_to_join_gets_no_copies_yet(
    first: RunDir, lines: tuple[Any, Any]
) -> None:
    """Node 0 joins the run of node 1, which has continued alone."""
    lines[0].wires.clear()
    lines[0].replica_ports |= {0: 1}
    sender = ReplicaSender(first, plan(0), lines[0])
    sender.look()
    assert sender._copy is None


def test_a_receiver_that_was_killed_is_replaced_at_the_same_port(
    first: RunDir, second: RunDir, receiver: ReplicaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, before = receiver.port, receiver._popen
    assert before
    before.send_signal(signal.SIGKILL)
    before.wait()
    receiver.look()
    assert receiver._popen is None, "a pause, if it fails again and again"
    receiver._started -= 60
    receiver.look()
    assert receiver.port == port and copy(first, receiver)["steps"] == [10]
    assert receiver._popen
    pid = receiver._popen.pid
    receiver.close()
    assert not Path(f"/proc/{pid}").exists() and receiver.port == 0


def test_copies_only_where_another_machine_needs_them(
    first: RunDir, second: RunDir, lines: tuple[Any, Any]
) -> None:
    script = {"script": {"path": "x.py", "args": []}}
    needs_all = plan(1)
    del needs_all["elastic"]
    for one in (plan(1, shared=True), plan(1, **script), needs_all):
        receiver = ReplicaReceiver(second, one, lines[1])
        assert receiver.port == 0 and receiver._popen is None
    lines[0].replica_ports[1] = 1
    needs_all = plan(0)
    del needs_all["elastic"]
    for one in (plan(0, **script), needs_all):
        sender = ReplicaSender(first, one, lines[0])
        sender.look()
        assert sender._copy is None
    lines[0].replica_ports.clear()  # it sees the same disk
    sender = ReplicaSender(first, plan(0), lines[0])
    sender.look()
    assert sender._copy is None
