"""Several machines with a cut network, a frozen supervisor or a frozen machine."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.two_machines import (
    ADDRESSES,
    HOST,
    UNREACHABLE,
    Cable,
    Node,
    cable,
    last_step,
    machines,
    node,
    silent,
)

__all__ = ["cable", "machines", "node"]  # fixtures

pytestmark = pytest.mark.slow
VERDICT_S = 15.0  # from a cut cable to the exit of both sides
BUSY_S = 60.0  # the same beside other tests in CI; make soak has the limit
SHORT_CUT_S = 3.0
FROZEN = "the machine answers, its supervisor does not"


def of_node(token: str, number: int) -> tuple[int, list[int]]:
    """Processes of this machine: its supervisor, and all others."""
    space = {pid: Path(f"/proc/{pid}/ns/net").readlink() for pid in processes(token)}
    commands = processes(token)
    supervisor = next(
        pid
        for pid, c in commands.items()
        if "training.cli.supervise" in c and (f"--node={number}" in c or not number)
    )
    return supervisor, [
        pid for pid in commands if pid != supervisor and space.get(pid) == space[supervisor]
    ]


@pytest.mark.parametrize("machine", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_cut_cable_is_named_on_both_sides(
    node: Node, cable: Cable, token: str, machine: int
) -> None:
    runs = [node(n, num_iterations=100000, retries=1) for n in range(2)]
    runs[0].wait_for("Iter: 3,")
    cable(machine)
    end = time.monotonic() + (VERDICT_S if machine else BUSY_S)
    assert [run.wait(end - time.monotonic()) for run in runs] == [4, 4]
    for run, other in zip(runs, (1, 0), strict=True):
        assert re.search(silent(other, UNREACHABLE), run.output), run.output[-3000:]
        assert (run.failure["cause"], run.failure["kind"], run.failure["node"]) == (
            "nccl_network",
            "silent",
            other,
        )
        assert f"Who        node {other}\n" in run.output and "restarting with" not in run.output
    assert f"not restarted: node 1 ({ADDRESSES[1]}, {HOST}) cannot be reached" in runs[0].output
    assert not processes(token)


@pytest.mark.soak
def test_a_network_that_loses_one_direction_is_named(node: Node, cable: Cable) -> None:
    runs = (node(0, num_iterations=100000), node(1, num_iterations=100000))
    runs[0].wait_for("Iter: 3,")
    cable(1, one_way=True)
    end = time.monotonic() + VERDICT_S
    assert [run.wait(end - time.monotonic()) for run in runs] == [4, 4]
    for run, other in zip(runs, (1, 0), strict=True):  # messages of node 0 still arrive
        assert re.search(silent(other, UNREACHABLE), run.output), run.output[-3000:]
        assert run.failure["cause"] == "nccl_network"


@pytest.mark.soak
def test_a_short_cut_and_a_frozen_supervisor_are_survived_and_a_stop_reaches_both(
    node: Node, cable: Cable, token: str
) -> None:
    first, second = node(0, num_iterations=100000), node(1, num_iterations=100000)
    first.wait_for("Iter: 3,")
    join = cable(1)
    time.sleep(SHORT_CUT_S)  # duration of the fault
    before = last_step(first)
    join()
    wait_until(lambda: last_step(first) > before + 3, 30, "the training continues")
    assert "silent" not in first.output + second.output

    supervisor, _ = of_node(token, 1)
    os.kill(supervisor, signal.SIGSTOP)
    wait_until(
        lambda: bool(re.search(silent(1, FROZEN), first.output)), 15, "the supervisor is found"
    )
    assert "; the ranks continue" in first.output
    before = last_step(first)
    wait_until(lambda: last_step(first) > before + 3, 30, "the training continues")
    os.kill(supervisor, signal.SIGCONT)
    first.wait_for(f"node 1 ({ADDRESSES[1]}, {HOST}) answers again")
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(30), second.wait(30)) == (75, 75), first.output[-2000:]
    assert "checkpoint saved" in first.output
    assert "silent" not in second.output, "it was suspended itself"


@pytest.mark.soak
def test_a_frozen_machine_is_named(node: Node, token: str) -> None:
    first, second = node(0, num_iterations=100000), node(1, num_iterations=100000)
    first.wait_for("Iter: 3,")
    supervisor, others = of_node(token, 1)
    for pid in (supervisor, *others):
        os.kill(pid, signal.SIGSTOP)
    assert first.wait(VERDICT_S) == 4
    assert re.search(silent(1, FROZEN), first.output), first.output[-3000:]
    assert (first.failure["cause"], first.failure["kind"]) == ("peer_died", "silent")
    for pid in (*others, supervisor):
        os.kill(pid, signal.SIGCONT)
    assert second.wait(30) == 4 and FROZEN in second.output, "it learns why"


@pytest.mark.soak
def test_a_machine_silent_at_the_rendezvous_is_named(node: Node, cable: Cable) -> None:
    runs = [node(n, nnodes=3, rendezvous_timeout=25, total_batch_size=384) for n in range(2)]
    runs[0].wait_for("node 1 has joined")
    runs[1].wait_for("waiting for node 0")
    cable(1)
    may_come = silent(1, f"{UNREACHABLE}; it may reconnect")
    wait_until(
        lambda: bool(re.search(may_come, runs[0].output)), VERDICT_S, "node 1 is found silent"
    )
    assert runs[1].wait(VERDICT_S) == 3 and re.search(
        f"before the start: {silent(0, UNREACHABLE)}", runs[1].output
    ), runs[1].output[-3000:]
    assert runs[0].wait(30) == 3 and "node 1, 2 of 3 did not connect" in runs[0].output
