"""Several machines without SLURM: two network namespaces joined by a virtual cable, each with an own address and no common loopback.
Needs root (or CAP_NET_ADMIN) and `ip`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.test_failures import in_forward
from training.rundir import RunDir, read_json

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
ADDRESSES = ("10.211.7.1", "10.211.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Names of two network namespaces that reach each other."""
    if not shutil.which("ip") or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces need root and iproute2")
    mark = uuid.uuid4().hex[:6]
    names, cables = [f"t{mark}{n}" for n in range(2)], [f"v{mark}{n}" for n in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture
def node(launch: Launch, machines: list[str], tmp_path: Path) -> Callable[..., Launched]:
    """Start this machine's part; each has a disk of its own unless `shared`."""

    def start(number: int, *, ranks: int = 1, shared: bool = False, name: str = "both", **more: object) -> Launched:
        disk = tmp_path / ("disk" if shared else f"disk{number}")
        flags = {"nnodes": 2, "node_rank": number, "master_addr": ADDRESSES[0], "out_dir": disk, "log_dir": disk / f"logs{number}"}
        own = [*("ip", "netns", "exec", machines[number]), "./launch_train.sh", str(ranks), CONFIG]
        run = launch(*own, name=name, **{**flags, **more})
        run.run = RunDir(disk / name, number)
        return run

    return start


Node = Callable[..., Launched]


def test_two_machines_train_like_one(node: Node, launch: Launch) -> None:
    second, first = node(1, ranks=2, total_batch_size=512), node(0, ranks=2, total_batch_size=512)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
    assert f"mode node 0 of 2, the first is {ADDRESSES[0]}:12355: 2 machines (--nnodes)" in first.output
    assert "node 1 is here" in first.output and "GLOO_SOCKET_IFNAME=v" in first.output and "GLOO_SOCKET_IFNAME=v" in second.output
    one = launch("./launch_train.sh", "4", CONFIG, total_batch_size=512).ok()
    assert first.losses == one.losses
    assert sorted(r["rank"] for r in (read_json(second.run.supervisor) or {})["ranks"]) == [2, 3]


def test_a_common_disk_has_one_run_and_a_folder_for_the_second(node: Node) -> None:
    first, second = node(0, shared=True), node(1, shared=True)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
    assert [p.name for p in first.run.path.parent.glob("*/plan.json")] == ["plan.json"]
    assert (read_json(first.run.plan) or {})["place"]["node_rank"] == 0
    assert (read_json(second.run.own_plan) or {})["place"]["node_rank"] == 1


def test_a_rank_that_dies_is_named_on_both(node: Node) -> None:
    first, second = node(0), node(1, hook=in_forward(1, 5, "raise ValueError('planted')"))
    assert (first.wait(), second.wait()) == (4, 4)
    for run in (first, second):
        assert "ValueError: planted" in run.output and "rank 1 on node 1" in run.output
        assert (run.failure["rank"], run.failure["node"]) == (1, 1)


def test_a_machine_that_disappears_is_named(node: Node, token: str) -> None:
    first, second = node(0, num_iterations=100000), node(1, num_iterations=100000)
    first.wait_for("Iter: 3,")
    for pid, command in processes(token).items():
        if "training.supervise" in command and "--node=1" in command:
            os.kill(pid, signal.SIGKILL)
    assert first.wait(30) == 4 and "node 1 is gone" in first.output
    second.wait(30)
    wait_until(lambda: not processes(token), 8, "everybody gone")


def test_asked_to_stop_on_one_machine_saves_and_stops_both(node: Node) -> None:
    first, second = node(0, num_iterations=100000), node(1, num_iterations=100000)
    first.wait_for("Iter: 3,")
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(30), second.wait(30)) == (75, 75)
    assert "checkpoint saved" in first.output


def test_a_missing_machine_is_named(node: Node) -> None:
    alone = node(0, meeting_timeout=6)
    assert alone.wait(30) == 3
    assert f"waiting for node 1 of 2 at {ADDRESSES[0]}:12355" in alone.output and "node 1 of 2 did not come" in alone.output


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (ADDRESSES[0], "nothing listens there (connection refused)"),
        ("10.211.7.77", "it can not be reached"),
        ("no-such-name.invalid", "the name 'no-such-name.invalid' is not known"),
    ],
)
def test_a_wrong_address_is_named(node: Node, address: str, why: str) -> None:
    lost = node(1, meeting_timeout=6, master_addr=address)
    assert lost.wait(40) == 3
    assert f"node 0 at {address}:12355 did not answer within 6 s (--meeting_timeout): {why}" in lost.output


def test_other_settings_are_refused_with_what_differs(node: Node) -> None:
    first, second = node(0, seed=1, meeting_timeout=8), node(1, seed=2)
    assert second.wait(30) == 2 and "refuses node 1: seed is 2 on node 1, but 1 on node 0" in second.output
    assert first.wait(30) == 3 and "refused: 10.211.7.2, which says it is node 1" in first.output


def test_a_taken_port_is_named_and_the_next_one_found(node: Node, machines: list[str]) -> None:
    listener = "import socket; s = socket.create_server(('0.0.0.0', 12355)); print('up', flush=True); [s.accept() for _ in range(99)]"
    taken = subprocess.Popen(["ip", "netns", "exec", machines[0], sys.executable, "-c", listener], stdout=subprocess.PIPE)
    try:
        assert taken.stdout and taken.stdout.readline() == b"up\n"
        first, second = node(0), node(1)
        assert (first.wait(), second.wait()) == (0, 0), first.output[-2000:] + second.output[-2000:]
        assert "port 12355 is taken by pid" in first.output and "meeting at 12356" in first.output
    finally:
        taken.kill()
        taken.wait()
