"""Two network namespaces connected by a virtual cable, with different addresses and no common
loopback: two machines. They need root (or CAP_NET_ADMIN) and `ip`."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import Launched
from training.core.rundir import RunDir

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
ADDRESSES = ("10.211.7.1", "10.211.7.2")
HOST = socket.gethostname()
UNREACHABLE = "no answer from its supervisor: the network or the machine is down"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def seeing(place: Path, instead: Path) -> tuple[str, ...]:
    """The begin of a command that sees `instead` at `place`, as a disk of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here (unshare -m)")
    mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ("unshare", "-m", "bash", "-c", mount, "bash", str(instead), str(place))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Names of two network namespaces that reach each other."""
    if (
        not shutil.which("ip")
        or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode
    ):
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
    """Starts this machine's part; each machine has its own disk unless `shared`. `before`: the begin
    of its command."""

    def start(
        number: int,
        *,
        ranks: int = 1,
        shared: bool = False,
        name: str = "both",
        before: Sequence[str] = (),
        **more: object,
    ) -> Launched:
        disk = tmp_path / ("disk" if shared else f"disk{number}")
        flags = {
            "nnodes": 2,
            "node_rank": number,
            "master_addr": ADDRESSES[0],
            "out_dir": disk,
            "log_dir": disk / f"logs{number}",
        }
        there = ("ip", "netns", "exec", machines[number], *before)
        own = [*there, "./launch_train.sh", str(ranks), CONFIG]
        run = launch(*own, name=name, **{**flags, **more})
        run.run = RunDir(disk / name, number or None)
        return run

    return start


Node = Callable[..., Launched]


@pytest.fixture
def cable(machines: list[str]) -> Iterator[Callable[..., Callable[[], None]]]:
    """Disconnects or connects the cable at this machine; `one_way`: only outgoing packets are
    lost."""
    joined: list[Callable[[], None]] = []

    def cut(number: int, *, one_way: bool = False) -> Callable[[], None]:
        def change(up: bool) -> None:
            if one_way:
                ip(
                    "-n",
                    machines[number],
                    "route",
                    "del" if up else "add",
                    "blackhole",
                    f"{ADDRESSES[1 - number]}/32",
                )
            else:
                ip(
                    "-n",
                    machines[number],
                    "link",
                    "set",
                    f"v{machines[number][1:]}",
                    "up" if up else "down",
                )

        def join() -> None:
            if join in joined:
                joined.remove(join)
                change(True)

        change(False)
        joined.append(join)
        return join

    yield cut
    for join in list(joined):
        join()


Cable = Callable[..., Callable[[], None]]


def silent(number: int, why: str) -> str:
    """Pattern of the message about a silent machine: after 10 s, slightly later on a busy machine,
    or slightly earlier if the other side gave up first."""
    return (
        re.escape(f"node {number} ({ADDRESSES[number]}, {HOST}) silent for ")
        + r"(9|1\d) s: "
        + re.escape(why)
    )


def last_step(run: Launched) -> int:
    return max(run.steps, default=0)
