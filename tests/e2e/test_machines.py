"""Several machines without SLURM: two network namespaces connected by a virtual cable, with
different addresses and no common loopback. Needs root (or CAP_NET_ADMIN) and `ip`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.hooks import in_forward
from training.core.rundir import RunDir, read_json
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

pytestmark = pytest.mark.slow
Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
ADDRESSES = ("10.211.7.1", "10.211.7.2")
HOST = socket.gethostname()
VERDICT_S = 15.0  # from a cut cable to the exit of both sides
SHORT_CUT_S = 3.0
UNREACHABLE = "no answer from its supervisor: the network or the machine is down"
FROZEN = "the machine answers, its supervisor does not"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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
    """Starts this machine's part; each machine has its own disk unless `shared`."""

    def start(
        number: int, *, ranks: int = 1, shared: bool = False, name: str = "both", **more: object
    ) -> Launched:
        disk = tmp_path / ("disk" if shared else f"disk{number}")
        flags = {
            "nnodes": 2,
            "node_rank": number,
            "master_addr": ADDRESSES[0],
            "out_dir": disk,
            "log_dir": disk / f"logs{number}",
        }
        own = [*("ip", "netns", "exec", machines[number]), "./launch_train.sh", str(ranks), CONFIG]
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
def test_both_machines_restart_after_a_killed_rank(
    node: Node, once: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank alone on its machine takes all cores, and the number of threads decides the rounding.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
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


@pytest.mark.parametrize("machine", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_cut_cable_is_named_on_both_sides(
    node: Node, cable: Cable, token: str, machine: int
) -> None:
    runs = [node(n, num_iterations=100000, retries=1) for n in range(2)]
    runs[0].wait_for("Iter: 3,")
    cable(machine)
    end = time.monotonic() + VERDICT_S
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


def test_a_missing_machine_is_named(node: Node) -> None:
    alone = node(0, rendezvous_timeout=6)
    assert alone.wait(30) == 3
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
    assert lost.wait(40) == 3
    assert (
        f"node 0 at {address}:12355 did not answer within 6 s (--rendezvous_timeout): {why}"
        in lost.output
    )


def test_different_settings_are_rejected_by_name(node: Node) -> None:
    first, second = node(0, seed=1, rendezvous_timeout=8), node(1, seed=2)
    assert (
        second.wait(30) == 2
        and "refuses node 1: seed is 2 on node 1, but 1 in the run" in second.output
    )
    assert first.wait(30) == 3 and "refused 10.211.7.2 as node 1" in first.output


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


# ── a script on two nodes, here on one machine
# ───────────────────────────────────────────────────────────────────────

LATE = """
import os, pathlib, time
other = pathlib.Path(__file__).with_name("rank0.pid")
if os.environ["RANK"] == "0":
    other.write_text(str(os.getpid()))
else:
    while not (other.exists() and other.read_text()) or os.path.exists(f"/proc/{other.read_text()}"):
        time.sleep(0.05)
    raise ValueError("planted")
"""
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["RANK"])))
print("ready", flush=True)
time.sleep(600)
"""


def on_two_nodes(launch: Launch, folder: Path, code: str) -> list[Launched]:
    script, runs = folder / "main.py", []
    script.write_text(code)
    flags = {
        "nnodes": 2,
        "master_addr": LOOPBACK,
        "master_port": free_port(LOOPBACK),
        "device": "cpu",
        "report": False,
    }
    for number in range(2):
        disk = {
            "node_rank": number,
            "out_dir": folder / f"disk{number}",
            "log_dir": folder / f"logs{number}",
            "script": script,
        }
        runs.append(launch("./launch_train.sh", "1", tiny=False, name="both", **flags, **disk))
        runs[-1].run = RunDir(folder / f"disk{number}/both", number or None)
    return runs


def test_a_script_that_fails_after_the_first_machine_exited_has_failed(
    launch: Launch, tmp_path: Path
) -> None:
    runs = on_two_nodes(launch, tmp_path, LATE)
    assert [run.wait() for run in runs] == [4, 4], runs[0].output[-2000:]
    for run in runs:
        assert (run.failure["rank"], run.failure["node"], run.failure["summary"]) == (
            1,
            1,
            "ValueError: planted",
        )
        assert "SUCCESS" not in run.output
    assert not runs[0].summary


def test_a_script_stopped_on_one_machine_stops_on_both(launch: Launch, tmp_path: Path) -> None:
    runs = on_two_nodes(launch, tmp_path, SAVES)
    for rank, run in enumerate(runs):
        wait_until(
            lambda run=run, rank=rank: (
                "ready" in run.run.rank_log(rank).read_text()
                if run.run.rank_log(rank).exists()
                else False
            )
        )
    runs[1].process.send_signal(signal.SIGTERM)
    assert [run.wait(30) for run in runs] == [75, 75], runs[0].output[-2000:]
    assert (runs[0].summary["status"], runs[0].summary["exit_code"]) == (
        "stopped",
        75,
    ) and not runs[0].failure
    for rank, run in enumerate(runs):
        assert (
            f"rank {rank} {'exited with status 1' if rank else 'ended with status 0'}" in run.output
        )
        assert "SUCCESS" not in run.output and "failed" not in run.output
