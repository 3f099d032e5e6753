"""A run on several machines with --min_ranks: it continues without a lost machine, and takes it
back when its launcher is started again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank
from tests.e2e.test_fewer_ranks import CONFIG, FLAGS, events
from tests.e2e.two_machines import (
    UNREACHABLE,
    Cable,
    Node,
    cable,
    last_step,
    machines,
    node,
    silent,
)
from training.core.rundir import RunDir, read_json
from training.host.placement import LOOPBACK
from training.launcher.coordinator import LAST_CALL_S
from training.launcher.local_ranks import free_port

__all__ = ["cable", "machines", "node"]  # fixtures

Launch = Callable[..., Launched]
MACHINE = "MACHINE_OF_THE_TEST"
CLOSE = 1e-6  # sums in another order
# Rank 0 waits in its first attempt: the run must not end before the loss.
HELD = "sleep@rank=0,step={}".format
# Alone, rank 0 waits for the other machine to join: the run must not end before.
WAITS = """
import time
from pathlib import Path
import torch.nn.functional as F
original, calls = F.cross_entropy, [0]
def patient(*args, **kwargs):
    calls[0] += 1
    if "WORLD_SIZE" not in os.environ:
        while calls[0] > 24 and not Path({flag!r}).exists():
            time.sleep(0.05)
        time.sleep(0.02)
    return original(*args, **kwargs)
F.cross_entropy = patient
"""


def starter(
    launch: Launch, tmp_path: Path, nnodes: int, **flags: object
) -> Callable[..., Launched]:
    """Starts the part of one machine, here all on this one."""
    port = free_port(LOOPBACK)

    def start(number: int, **more: object) -> Launched:
        own = {
            "nnodes": nnodes,
            "node_rank": number,
            "master_addr": LOOPBACK,
            "master_port": port,
            "log_dir": tmp_path / f"logs{number}",
            "min_ranks": 1,
        }
        env = {MACHINE: str(number)}
        values = FLAGS | own | flags | more
        return launch("./launch_train.sh", "1", CONFIG, name="both", env=env, **values)

    return start


def kill_machine(token: str, number: int) -> None:
    """As if it were switched off: every process of it, without a chance to report."""
    mark = f"{MACHINE}={number}".encode()
    # the supervisor first: it would report the end of its rank
    found = sorted(processes(token).items(), key=lambda one: "cli.supervise" not in one[1])
    for pid, _ in found:
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def check(run: Launched, whole: Launched, before: int) -> None:
    """The same samples in every step."""
    assert len(run.losses) == len(whole.losses)
    assert run.losses[:before] == whole.losses[:before], "bit for bit with as many ranks"
    assert run.losses == pytest.approx(whole.losses, rel=CLOSE)


@pytest.mark.slow
def test_a_lost_machine_is_left_out_and_taken_back(
    launch: Launch, once: Launch, token: str, tmp_path: Path
) -> None:
    whole = once("./launch_train.sh", "2", CONFIG, **FLAGS)
    flag = tmp_path / "joins"
    start = starter(
        launch,
        tmp_path,
        2,
        hook=at_rank(0, WAITS.format(flag=str(flag)), "training.tasks.gpt.model"),
    )
    first, second = start(0), start(1)
    wait_until(lambda: last_step(first) >= 7, what="training")
    kill_machine(token, 1)
    assert second.wait() == -signal.SIGKILL
    again = start(1)
    again.wait_for("this machine joins at its next checkpoint")
    flag.touch()
    assert (first.wait(), again.wait()) == (0, 0), first.output[-3000:] + again.output[-3000:]
    check(first, whole, 5)
    lost, back = events(first, "restart")
    assert (lost["cause"], lost["kind"], lost["ranks"]) == ("peer_died", "gone", [2, 1])
    assert [(one["seat"], one["node"]) for one in lost["lost"]] == [(1, 1)]
    assert lost["expected_slowdown"] == 2.0 and lost["resumes_at"] >= 5
    assert (back["ranks"], back["back"], back["steps_lost"]) == ([1, 2], [1], 0)
    assert first.summary["lost"] == [] and not first.run.failure.exists()
    assert not processes(token)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("machine", "one_way", "shared"),
    [(1, False, True), (1, False, False), (0, False, True), (0, True, True), (1, True, True)],
    ids=str,
)
def test_a_cut_cable_leaves_one_side_only(
    node: Node,
    cable: Cable,
    once: Launch,
    token: str,
    machine: int,
    one_way: bool,
    shared: bool,
    tmp_path: Path,
) -> None:
    whole = once("./launch_train.sh", "2", CONFIG, **FLAGS)
    notified = tmp_path / "notified"
    flags = FLAGS | {"inject": HELD(13), "min_ranks": 1, "shared": shared}
    flags["notify"] = f"echo $DUET_STATUS >> {notified}"
    first, second = node(0, **flags), node(1, **flags)
    wait_until(lambda: last_step(first) >= 7, what="training")
    rank = second.pids[1]
    cable(machine, one_way=one_way)
    wait_until(lambda: events(first, "restart") != [], 40, "a restart")
    assert rank not in processes(token), "its rank had ended before"
    assert first.wait() == 0, first.output[-3000:]
    assert second.wait(60) == 6, second.output[-3000:]
    assert re.search(silent(0, UNREACHABLE), second.output), second.output[-3000:]
    (restart,) = events(first, "restart")
    assert (restart["kind"], restart["ranks"]) == ("silent", [2, 1])
    # on a common disk it knows that node 0 continues
    assert sorted(notified.read_text().split()) == (
        ["finished"] if shared else ["finished", "left"]
    )
    check(first, whole, 5)
    assert not processes(token)


@pytest.mark.soak
def test_another_machine_replaces_the_lost_one(
    launch: Launch, once: Launch, token: str, tmp_path: Path
) -> None:
    """16 sequences: two ranks of the three that are left."""
    flags = FLAGS | {"total_batch_size": 512, "num_iterations": 100}
    whole = once("./launch_train.sh", "4", CONFIG, **flags)
    start = starter(launch, tmp_path, 4, **flags)
    runs = [start(number) for number in range(4)]
    for lost, step in ((2, 7), (1, 30)):
        wait_until(lambda step=step: last_step(runs[0]) >= step, what="training")
        kill_machine(token, lost)
    assert [runs[n].wait() for n in (0, 3)] == [0, 0], runs[0].output[-3000:]
    assert "this machine has no ranks at present" in runs[3].output
    assert [one["ranks"] for one in events(runs[0], "restart")] == [[4, 2], [2, 2]]
    plan = read_json(runs[0].run.plan) or {}
    assert plan["elastic"]["seats"] == [0, 3] and plan["ranks"] == 2
    check(runs[0], whole, 5)
    assert not processes(token)


@pytest.mark.soak
def test_below_the_minimum_the_run_ends(launch: Launch, token: str, tmp_path: Path) -> None:
    flags = {"num_iterations": 100000, "min_ranks": 2, "rendezvous_timeout": 40}
    start = starter(launch, tmp_path, 3, **flags)
    runs = [start(number) for number in range(3)]
    wait_until(lambda: last_step(runs[0]) >= 7, what="training")
    for number in (1, 2):
        kill_machine(token, number)
    runs[0].wait_for("waiting for another machine to join")
    assert not runs[0].run.failure.exists()
    assert runs[0].wait(90) == 4
    assert runs[0].failure["cause"] == "peer_died"
    assert "1 rank left, and min_ranks is 2" in events(runs[0], "given_up")[0]["text"]
    assert not processes(token)


def frozen(run: Launched) -> None:
    """Suspend its supervisor and kill its rank."""
    pid = run.pids[0] if 0 in run.pids else run.pids[1]
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_request_between_two_starts_ends_every_machine(
    launch: Launch, token: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Node 0 waits for node 1, whose supervisor is suspended."""
    start = starter(launch, tmp_path, 2, num_iterations=100000)
    first, second = start(0), start(1)
    second.run = RunDir(first.run.path, 1)
    wait_until(lambda: last_step(first) >= 7, what="training")
    frozen(second)
    first.wait_for("to be ready")
    first.process.send_signal(number)
    assert first.wait(10) == code, first.output[-3000:]
    assert "stopped before the restart; step" in first.output
    assert first.failure["kind"] == "asked"
    os.kill(second.process.pid, signal.SIGCONT)
    assert second.wait(30) == code, second.output[-3000:]
    assert not processes(token)


@pytest.mark.soak
def test_a_machine_that_waits_for_a_decision_can_be_stopped(
    launch: Launch, token: str, tmp_path: Path
) -> None:
    start = starter(launch, tmp_path, 2, num_iterations=100000)
    first, second = start(0), start(1)
    wait_until(lambda: last_step(first) >= 7, what="training")
    frozen(first)
    second.wait_for("decision")
    second.process.send_signal(signal.SIGTERM)
    assert second.wait(10) == 75, second.output[-3000:]
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait(30) == 75, "its restart was due, and the request came before it"
    assert not processes(token)


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("ranks", dist.get_world_size(), "restarts", restarts, flush=True)
for _ in range(10 if restarts == int(os.environ["LAST"]) else 100000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
dist.destroy_process_group()
"""


def script_starter(
    launch: Launch, tmp_path: Path, nnodes: str, last: int
) -> Callable[[int], Launched]:
    """Starts the part of one machine; the script ends after `last` restarts."""
    (tmp_path / "loop.py").write_text(SCRIPT)
    port = free_port(LOOPBACK)

    def start(number: int) -> Launched:
        words = [f"--nnodes={nnodes}", f"--node-rank={number}"]
        words += [f"--rdzv-endpoint={LOOPBACK}:{port}", f"--log_dir={tmp_path / str(number)}"]
        words += [f"--out_dir={tmp_path / 'experiments'}", "--run_name=both", "--device=cpu"]
        words += ["--report=false", str(tmp_path / "loop.py")]
        env = {MACHINE: str(number), "LAST": str(last)}
        return launch("./duet", "run", "-n", "1", *words, bare=True, name="both", env=env)

    return start


@pytest.mark.slow
def test_a_script_starts_without_a_machine_and_waits_below_the_minimum(
    launch: Launch, token: str, tmp_path: Path
) -> None:
    """torchrun's contract for --nnodes=2:3."""
    start = script_starter(launch, tmp_path, "2:3", 2)
    runs = [start(number) for number in range(2)]
    runs[0].wait_for("ranks 2 restarts 0", LAST_CALL_S + 120)
    assert "3 → 2 ranks (without node 2)" in runs[0].output
    kill_machine(token, 1)
    runs[0].wait_for("waiting for another machine to join")
    runs[1] = start(1)
    runs[0].wait_for("ranks 2 restarts 1")
    runs.append(start(2))
    assert [run.wait() for run in runs] == [0, 0, 0], runs[0].output[-3000:]
    assert "ranks 3 restarts 2" in runs[0].output
    assert runs[0].summary["lost"] == [] and not runs[0].run.failure.exists()
    assert not processes(token)


@pytest.mark.soak
@pytest.mark.parametrize(("lost", "leader"), [(2, 0), (0, 1)])
def test_a_script_starts_again_without_and_with_a_machine(
    launch: Launch, token: str, tmp_path: Path, lost: int, leader: int
) -> None:
    start = script_starter(launch, tmp_path, "1:3", 2)
    runs = [start(number) for number in range(3)]
    runs[0].wait_for("ranks 3 restarts 0")
    kill_machine(token, lost)
    runs[leader].wait_for("ranks 2 restarts 1")
    runs[lost] = start(lost)
    assert [run.wait() for run in runs] == [0, 0, 0], runs[leader].output[-3000:]
    assert "ranks 3 restarts 2" in runs[leader].output
    assert [one["ranks"] for one in events(runs[0], "restart")] == [[3, 2], [2, 3]]
    assert not processes(token)
