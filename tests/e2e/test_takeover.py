"""The machine that coordinates a run with --min_ranks is lost: another one takes over."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank
from tests.e2e.test_fewer_machines import (
    CONFIG,
    FLAGS,
    HELD,
    MACHINE,
    check,
    kill_machine,
    starter,
)
from tests.e2e.test_fewer_ranks import events
from tests.e2e.test_own_disks import Machine, copied, machine
from tests.e2e.two_machines import Cable, Node, cable, last_step, machines, node
from training.core.rundir import RunDir, read_json
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

__all__ = ["cable", "machine", "machines", "node"]  # fixtures

Launch = Callable[..., Launched]
# With two ranks, rank 0 waits for the third machine: the run must not end before.
WAITS = """
import time
from pathlib import Path
import torch.nn.functional as F
original, calls = F.cross_entropy, [0]
def patient(*args, **kwargs):
    calls[0] += 1
    if os.environ.get("WORLD_SIZE") == "2":
        while calls[0] > 24 and not Path({flag!r}).exists():
            time.sleep(0.05)
    return original(*args, **kwargs)
F.cross_entropy = patient
"""


@pytest.mark.slow
def test_another_machine_takes_over_when_the_first_is_lost(
    launch: Launch, once: Launch, token: str, tmp_path: Path
) -> None:
    whole = once("./launch_train.sh", "3", CONFIG, **FLAGS)
    start = starter(launch, tmp_path, 3, inject=HELD(13))
    runs = [start(number) for number in range(3)]
    wait_until(lambda: last_step(runs[0]) >= 7, what="training")
    kill_machine(token, 0)
    assert [runs[n].wait() for n in (1, 2)] == [0, 0], runs[1].output[-3000:] + runs[2].output
    check(runs[0], whole, 5)
    (restart,) = events(runs[0], "restart")
    assert (restart["cause"], restart["ranks"]) == ("peer_died", [3, 2])
    assert [(one["seat"], one["node"]) for one in restart["lost"]] == [(0, 0)]
    (takeover,) = events(runs[0], "takeover")
    assert takeover["node"] == 1
    plan = read_json(runs[0].run.plan) or {}
    assert plan["place"]["leader"] == 1 and plan["elastic"]["seats"] == [1, 2]
    assert not runs[0].run.failure.exists() and runs[0].run.report.exists() is False
    assert not list(runs[0].run.path.glob(".launch-*"))
    assert not processes(token)


@pytest.mark.soak
def test_the_first_machine_joins_the_run_that_continued(
    launch: Launch, once: Launch, token: str, tmp_path: Path
) -> None:
    whole = once("./launch_train.sh", "3", CONFIG, **FLAGS)
    flag = tmp_path / "joins"
    hook = at_rank(0, WAITS.format(flag=str(flag)), "training.tasks.gpt.model")
    start = starter(launch, tmp_path, 3, hook=hook)
    runs = [start(number) for number in range(3)]
    wait_until(lambda: last_step(runs[0]) >= 7, what="training")
    kill_machine(token, 0)
    again = start(0)
    again.wait_for("this machine joins at its next checkpoint")
    flag.touch()
    codes = [run.wait() for run in (again, runs[1], runs[2])]
    assert codes == [0, 0, 0], again.output[-3000:] + runs[1].output[-3000:]
    check(runs[0], whole, 5)
    lost, back = events(runs[0], "restart")
    assert (lost["ranks"], back["ranks"], back["back"]) == ([3, 2], [2, 3], [0])
    plan = read_json(runs[0].run.plan) or {}
    assert plan["elastic"]["seats"] == [1, 0, 2], "rank 0 is on the machine that writes the run"
    assert not list(runs[0].run.path.glob("**/machines.json"))
    assert not processes(token)


def two(
    node: Node, once: Launch, *, shared: bool, held: int = 13, **length: int
) -> tuple[Launched, ...]:
    """A run on one machine, to compare with, and the parts of two machines, which wait at the step
    `held` until one is lost."""
    flags = FLAGS | length
    whole = once("./launch_train.sh", "2", CONFIG, **flags)
    flags |= {"inject": HELD(held), "min_ranks": 1, "shared": shared}
    return whole, *(node(n, **flags, env={MACHINE: str(n)}) for n in range(2))


@pytest.mark.soak
def test_the_first_machine_loses_its_power(
    node: Node, cable: Cable, once: Launch, token: str
) -> None:
    """No packet reports it: the common disk decides that node 1 continues."""
    whole, first, second = two(node, once, shared=True)
    wait_until(lambda: last_step(first) >= 7, what="training")
    cable(0)
    kill_machine(token, 0)
    assert second.wait() == 0, second.output[-3000:]
    check(first, whole, 5)
    (restart,) = events(first, "restart")
    assert (restart["kind"], restart["ranks"]) == ("silent", [2, 1])
    assert not first.run.failure.exists() and not processes(token)


@pytest.mark.soak
def test_a_suspended_first_machine_ends_when_it_wakes_up(
    node: Node, cable: Cable, once: Launch, token: str
) -> None:
    whole, first, second = two(node, once, shared=True, num_iterations=60)
    wait_until(lambda: last_step(first) >= 7, what="training")
    suspended = [first.process.pid, first.pids[0]]
    join = cable(0)
    for pid in suspended:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: len(events(first, "takeover")) == 1, what="a takeover")
    for pid in suspended:
        os.kill(pid, signal.SIGCONT)
    join()
    assert (first.wait(60), second.wait()) == (6, 0), first.output[-3000:] + second.output[-3000:]
    assert "another machine continues the run" in first.output
    check(first, whole, 5)
    assert not first.run.failure.exists() and not processes(token)


@pytest.mark.soak
def test_a_machine_with_its_own_disk_takes_over(node: Node, once: Launch, token: str) -> None:
    """Its copy of the checkpoint and of the records becomes the run."""
    whole, first, second = two(node, once, shared=False, held=25, save_every=20)
    wait_until(lambda: events(first, "replica") != [], what="a copy")
    kill_machine(token, 0)
    assert second.wait() == 0, second.output[-3000:]
    second.run = RunDir(second.run.path)
    check(second, whole, 20)
    assert [one["node"] for one in events(second, "takeover")] == [1]
    assert second.summary["status"] == "done" and not processes(token)


@pytest.mark.soak
def test_a_new_machine_in_place_of_the_first_joins_with_the_same_command(
    machine: Machine, token: str, tmp_path: Path
) -> None:
    port, flags = free_port(LOOPBACK), {"num_iterations": 100000, "save_every": 5, "min_ranks": 1}
    first, second = (machine(number, port, **flags) for number in range(2))
    wait_until(lambda: copied(first), 90, "a copy")
    first.process.kill()
    second.wait_for("a new machine in place of node 0")
    second.run = RunDir(second.run.path)
    shutil.rmtree(tmp_path / "disk0")
    again = machine(0, port, **flags)
    wait_until(lambda: events(second, "restart")[1:] != [], 120, "a restart with both")
    back = events(second, "restart")[1]
    assert (back["ranks"], back["back"]) == ([1, 2], [0])
    again.wait_for("step")
    again.process.send_signal(signal.SIGTERM)
    assert (again.wait(), second.wait()) == (75, 75), again.output[-3000:] + second.output[-3000:]
    assert "continues without this machine, coordinated by node 1" in again.output
    assert not processes(token)
