"""Several machines without SLURM: training, lost ranks and machines, and the rendezvous."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.hooks import in_forward
from tests.e2e.two_machines import ADDRESSES, CONFIG, HOST, Launch, Node, machines, node, seeing
from training.core.rundir import read_json

__all__ = ["machines", "node"]  # fixtures

pytestmark = pytest.mark.slow


def test_two_machines_train_like_one(node: Node, launch: Launch, tmp_path: Path) -> None:
    flags = {
        "ranks": 2,
        "total_batch_size": 512,
        "notify": f"echo \"$DUET_STATUS\" >> '{tmp_path}/sent'",
    }
    second, first = node(1, **flags), node(0, **flags)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
    assert (
        f"mode node 0 of 2, the first is {ADDRESSES[0]}:12355: 2 machines (--nnodes)"
        in first.output
    )
    assert (
        "node 1 has joined" in first.output
        and "GLOO_SOCKET_IFNAME=v" in first.output
        and "GLOO_SOCKET_IFNAME=v" in second.output
    )
    one = launch("./launch_train.sh", "4", CONFIG, total_batch_size=512).ok()
    assert first.losses == one.losses
    assert [len(first.steps[12][name]) for name in ("compute_ms", "memory_bytes")] == [4, 4], (
        "of all machines"
    )
    assert (tmp_path / "sent").read_text() == "finished\n", "by node 0 alone"
    assert sorted(r["rank"] for r in (read_json(second.run.supervisor) or {})["ranks"]) == [2, 3]


@pytest.mark.soak
def test_machines_with_a_common_disk_have_their_own_copies_of_the_text(
    node: Node, project: Path, tmp_path: Path
) -> None:
    """Prepared below the project, each on its own disk."""
    text, copy, cache = (tmp_path / name for name in ("text", "copy", "cache"))
    for folder in (text, copy, cache):
        folder.mkdir()
    for folder in (text, copy):
        (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    (project / "data").mkdir(exist_ok=True)
    there = (*seeing(text, copy), *seeing(project / "data", cache))
    first = node(0, shared=True, data=text)
    second = node(1, shared=True, data=text, before=there)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
    assert list(cache.iterdir())


@pytest.mark.soak
def test_a_common_disk_has_one_run_and_both_machines_stop_together(
    node: Node,
) -> None:
    first, second = (
        node(0, shared=True, num_iterations=100000),
        node(1, shared=True, num_iterations=100000),
    )
    first.wait_for("Iter: 3,")
    first.process.send_signal(signal.SIGTERM)
    assert (first.wait(30), second.wait(30)) == (75, 75), (
        first.output[-2000:] + second.output[-2000:]
    )
    assert [p.name for p in first.run.path.parent.glob("*/plan.json")] == ["plan.json"]
    assert (read_json(first.run.plan) or {})["place"]["node_rank"] == 0
    assert (read_json(second.run.own_plan) or {})["place"]["node_rank"] == 1


def test_a_dead_rank_is_named_on_both_machines(node: Node) -> None:
    first, second = node(0), node(1, hook=in_forward(1, 5, "raise ValueError('planted')"))
    assert (first.wait(), second.wait()) == (4, 4)
    for run in (first, second):
        assert "ValueError: planted" in run.output and "rank 1 on node 1" in run.output
        assert (run.failure["rank"], run.failure["node"]) == (1, 1)


@pytest.mark.soak
def test_a_machine_that_disappears_is_named(node: Node, token: str) -> None:
    first, second = node(0, num_iterations=100000), node(1, num_iterations=100000)
    first.wait_for("Iter: 3,")
    for pid, command in processes(token).items():
        if "training.cli.supervise" in command and "--node=1" in command:
            os.kill(pid, signal.SIGKILL)
    assert (
        first.wait(30) == 4
        and f"node 1 ({ADDRESSES[1]}, {HOST}) is lost: closed by the other side" in first.output
    )
    assert (first.failure["cause"], first.failure["kind"], first.failure["node"]) == (
        "peer_died",
        "gone",
        1,
    )
    second.wait(30)
    wait_until(lambda: not processes(token), 8, "everybody gone")


@pytest.mark.soak
def test_both_machines_restart_after_a_killed_rank(node: Node, once: Launch) -> None:
    saving: dict[str, Any] = {"num_iterations": 40, "save_every": 5}
    again = saving | {"shared": True, "retries": 1, "inject": "kill@rank=1,step=23"}
    first, second = node(0, **again), node(1, **again)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert (
        "restarting from step 20 (1 of 1), 3 steps lost" in first.output
        and "resumed from step_00000020" in first.output
    )
    assert "restarting with the other machines" in second.output
    whole = once("./launch_train.sh", "2", CONFIG, **saving)
    assert first.losses == whole.losses, "bit for bit"


def test_a_missing_machine_is_named(node: Node) -> None:
    alone = node(0, rendezvous_timeout=6)
    assert alone.wait() == 3
    assert (
        f"waiting for node 1 of 2 at {ADDRESSES[0]}:12355" in alone.output
        and "node 1 of 2 did not connect" in alone.output
    )


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (ADDRESSES[0], "nothing listens there (connection refused)"),
        pytest.param("10.211.7.77", "it cannot be reached", marks=pytest.mark.soak),
        pytest.param(
            "no-such-name.invalid",
            "unknown host name 'no-such-name.invalid'",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_wrong_address_is_named(node: Node, address: str, why: str) -> None:
    lost = node(1, rendezvous_timeout=6, master_addr=address)
    assert lost.wait() == 3
    assert (
        f"node 0 at {address}:12355 did not answer within 6 s (--rendezvous_timeout): {why}"
        in lost.output
    )


def test_different_settings_are_rejected_by_name(node: Node) -> None:
    first, second = node(0, seed=1), node(1, seed=2)
    assert (
        second.wait() == 2
        and "refuses node 1: seed is 2 on node 1, but 1 in the run" in second.output
    )
    first.wait_for("refused 10.211.7.2 as node 1")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75, "it had waited for the right one"


@pytest.mark.soak
def test_a_port_in_use_is_named_and_the_next_one_used(node: Node, machines: list[str]) -> None:
    listener = (
        "import socket; s = socket.create_server(('0.0.0.0', 12355)); print('up', "
        "flush=True); [s.accept() for _ in range(99)]"
    )
    taken = subprocess.Popen(
        ["ip", "netns", "exec", machines[0], sys.executable, "-c", listener], stdout=subprocess.PIPE
    )
    try:
        assert taken.stdout and taken.stdout.readline() == b"up\n"
        first, second = node(0), node(1)
        assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
        assert "port 12355 is in use by pid" in first.output and "using 12356" in first.output
    finally:
        taken.kill()
        taken.wait()
