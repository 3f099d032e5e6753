"""Two of three machines lose each other's packets, and both reach the one that coordinates."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.elastic.network import Network, address, network, unusable
from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.test_fewer_ranks import CONFIG, FLAGS, events
from tests.e2e.two_machines import Launch, last_step
from training.core.rundir import RunDir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
MACHINES = 3


@pytest.fixture
def lan() -> Iterator[Network]:
    if why := unusable():
        pytest.skip(why)
    with network(MACHINES) as made:
        yield made


@pytest.fixture
def start(launch: Launch, lan: Network, tmp_path: Path) -> Callable[[int], Launched]:
    """Starts the part of one machine."""
    flags = FLAGS | {"num_iterations": 100000, "nnodes": MACHINES, "min_ranks": 1}
    flags |= {"master_addr": address(0), "out_dir": tmp_path / "disk"}

    def started(number: int) -> Launched:
        space = [*("ip", "netns", "exec", lan.names[number]), "./launch_train.sh", "1", CONFIG]
        own = flags | {"node_rank": number, "log_dir": tmp_path / f"logs{number}"}
        run = launch(*space, name="three", **own)
        run.run = RunDir(tmp_path / "disk/three", number or None)
        return run

    return started


def test_the_machine_that_was_left_out_is_taken_back_once_it_reaches_the_other(
    start: Callable[[int], Launched], lan: Network, token: str
) -> None:
    first, second, third = (start(number) for number in range(MACHINES))
    wait_until(lambda: last_step(first) >= 7, what="training")
    lan.part(1, 2)
    wait_until(lambda: events(first, "restart") != [], 60, "a restart without one of the two")
    (lost,) = events(first, "restart")
    assert (lost["cause"], lost["kind"], lost["ranks"]) == ("nccl_network", "silent", [3, 2])
    assert [one["node"] for one in lost["lost"]] == [2]
    assert third.wait(60) == 6, third.output[-3000:]

    again = start(2)
    again.wait_for("it did not reach node 1")
    again.wait_for("waiting for node 0")  # its data is prepared
    seen = last_step(first)
    wait_until(lambda: last_step(first) > seen + 15, 120, "more checkpoints")
    assert len(events(first, "restart")) == 1, "the path is still lost"
    lan.join(2)
    wait_until(lambda: len(events(first, "restart")) == 2, 120, "a restart with it")
    back = events(first, "restart")[1]
    assert (back["ranks"], back["back"], back["steps_lost"]) == ([2, 3], [2], 0)
    seen = last_step(first)
    wait_until(lambda: last_step(first) > seen + 3, 120, "training with all machines")
    first.process.send_signal(signal.SIGTERM)
    assert [run.wait(60) for run in (first, second, again)] == [75] * MACHINES
    assert not processes(token)
