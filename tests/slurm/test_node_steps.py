"""A job with --min_ranks: how it is submitted, and its steps, here without SLURM."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from tests.cases import each
from tests.conftest import ROOT, wait_until
from training.core import rundir
from training.core.errors import UserError
from training.core.messages import load_all
from training.host import network, process
from training.launcher.hosts.conductor import AGAIN_S, STEADY_S
from training.launcher.slurm import job, job_request, node_steps, submission
from training.launcher.slurm.node_steps import NodeSteps
from training.launcher.slurm.submission import FrozenJob

CONFIG = "configs/dual_gpu/quickstart.py"
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_CPUS_ON_NODE": "8",
}


@each(
    "words, no_kill",
    [
        ("", False),
        ("--min_ranks=1", True),
        ("--min_ranks=4", False),  # all are needed
        ("--min_ranks=1 --nodes=1", False),
    ],
)
def test_a_job_that_can_lose_a_node_is_submitted_with_no_kill(words: str, no_kill: bool) -> None:
    args = ["--nodes=2", "--ranks_per_node=2", CONFIG, "--device=cpu", "--total_batch_size=8192"]
    request, line, nodes, ranks = job_request.typed([*args, *words.split()], {})
    command = submission.sbatch(FrozenJob(Path("run/code")), request, line, nodes, ranks)
    assert ("--no-kill" in command) is no_kill


def test_the_user_can_refuse_no_kill() -> None:
    args = ["--nodes=2", "--ranks_per_node=2", CONFIG, "--device=cpu", "--total_batch_size=8192"]
    request, line, nodes, ranks = job_request.typed([*args, "--min_ranks=2", "--no-kill=off"], {})
    command = submission.sbatch(FrozenJob(Path("run/code")), request, line, nodes, ranks)
    given = [word for word in command if word.startswith("--no-kill")]
    assert given[-1] == "--no-kill=off", "sbatch takes the last one"


@pytest.fixture
def frozen(tmp_path: Path) -> FrozenJob:
    frozen = FrozenJob(tmp_path / "code")
    facts = {
        "code": {"sentence": "1 file"},
        "ranks_per_node": 2,
        "out_dir": "o",
        "log_dir": "l",
        "flags": ["--min_ranks=1"],
        "starts": [],
    }
    rundir.write_json(frozen.record, facts)
    return frozen


def step(frozen: FrozenJob) -> str:
    load_all()
    return shlex.join(job.begin(frozen, JOB))


def test_the_step_of_a_job(frozen: FrozenJob) -> None:
    assert "srun --nodes=2 --ntasks=2" in step(frozen), "one step, of all nodes"
    elastic = {"min_ranks": 1, "rejoin": True, "no_kill": True}
    rundir.write_json(frozen.record, {**frozen.facts(), "elastic": elastic})
    assert step(frozen).endswith(f"training.cli.submit nodes {frozen.code}"), "one for each node"
    launch = job.launch(frozen)
    assert launch[1] == "2" and "--min_ranks=1" in launch


class Job:
    """`ends`: for each node rank, when and with which status its steps end, in this order."""

    def __init__(self, ends: dict[int, list[tuple[float, int]]]) -> None:
        self.ends, self.starts, self.nodes = ends, [], ["n0", "n1"]  # type: ignore[var-annotated]

    def start(self, rank: int, joins: bool) -> subprocess.Popen[bytes]:
        assert joins is (rank in self.starts)
        seconds, status = self.ends[rank][self.starts.count(rank)]
        self.starts.append(rank)
        code = f"import os, time; time.sleep({seconds}); os._exit({status})"
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    def run(self, *, again: bool = True) -> int:
        load_all()
        steps = NodeSteps(self.start, ["n0", "n1"], lambda name: name in self.nodes, again=again)
        with socket.create_server(("127.0.0.1", 0)) as alive:
            return steps.run(alive)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(node_steps, "AGAIN_S", 0.1)
    monkeypatch.setattr(job, "LAST_NODE_S", 1)
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_killed_launcher_is_started_again() -> None:
    job = Job({0: [(1.5, 0)], 1: [(0.0, 137), (0.0, 3), (1.5, 0)]})
    assert job.run() == 0 and job.starts == [0, 1, 1, 1]


def test_a_killed_launcher_of_the_first_node_joins_the_others() -> None:
    job = Job({0: [(0.0, 137), (1.0, 0)], 1: [(2.0, 0)]})
    assert job.run() == 0 and job.starts == [0, 1, 0]


def test_a_first_node_that_has_left_the_run_does_not_end_it() -> None:
    job = Job({0: [(0.0, 6), (1.0, 0)], 1: [(2.0, 0)]})
    assert job.run() == 0 and job.starts == [0, 1, 0]


@pytest.mark.parametrize(("other", "code"), [((0.5, 0), 0), ((0.0, 137), 6)])
def test_a_first_node_that_failed_does_not_complete_the_job(
    other: tuple[float, int], code: int
) -> None:
    """SLURM ends the step of a failed node with 0."""
    job = Job({0: [(0.3, 0)], 1: [other]})
    job.nodes = ["n1"]
    assert job.run(again=False) == code


@pytest.mark.parametrize(("seconds", "continues"), [(2 * STEADY_S, True), (0.0, False)])
def test_a_node_that_was_lost_and_is_back_takes_over(seconds: float, continues: bool) -> None:
    """`seconds`: since its launcher was started again."""
    load_all()
    steps = NodeSteps(lambda *_: pytest.fail("too early"), ["n0", "n1"], lambda _: True, again=True)
    running = cast("subprocess.Popen[bytes]", object())
    steps._running, steps._pauses = {1: running}, {1: AGAIN_S}
    steps._started = dict.fromkeys((0, 1), time.monotonic() - seconds)
    steps._ended(0, 137)
    assert (steps._first, 0 in steps._due, steps._over_at is None) == (
        (1, True, True) if continues else (0, False, False)
    )


def test_a_node_that_ends_with_the_failed_run_is_not_started_again() -> None:
    """The first node ends later: it writes the report and notifies."""
    job = Job({0: [(0.8, 4)], 1: [(0.0, 4)]})
    assert job.run() == 4 and job.starts == [0, 1]


def test_a_node_that_failed_alone_is_started_again() -> None:
    job = Job({0: [(3.0, 0)], 1: [(0.0, 4), (3.0, 0)]})
    assert job.run() == 0 and job.starts == [0, 1, 1]


def test_not_without_rejoin() -> None:
    job = Job({0: [(0.5, 0)], 1: [(0.0, 137)]})
    assert job.run(again=False) == 0 and job.starts == [0, 1]


def test_a_failed_node_is_not_started_again() -> None:
    job = Job({0: [(0.5, 75)], 1: [(0.0, 0)]})
    job.nodes.remove("n1")
    assert job.run() == 75 and job.starts == [0, 1], "its step ends with 0"


def test_a_stop_ends_it() -> None:
    job = Job({0: [(0.5, 75)], 1: [(0.0, 75)]})
    assert job.run() == 75 and job.starts == [0, 1]


def test_after_a_stop_the_nodes_save_as_long_as_they_need() -> None:
    job = Job({0: [(3.0, 75)], 1: [(0.0, 137)]})
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert job.run() == 75 and job.starts[:2] == [0, 1]


def test_a_node_that_rejects_its_first_start_ends_the_others() -> None:
    job = Job({0: [(60.0, 0)], 1: [(0.0, 2)]})
    began = time.monotonic()
    assert job.run() == 2 and time.monotonic() - began < 30


def test_a_node_that_stays_is_ended() -> None:
    job = Job({0: [(0.0, 4)], 1: [(60.0, 0)]})
    began = time.monotonic()
    assert job.run() == 4 and time.monotonic() - began < 30


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param(
            "::1",
            marks=pytest.mark.skipif(
                "::1" not in network.own_addresses(), reason="this machine has no IPv6"
            ),
        ),
    ],
)
def test_the_other_nodes_find_the_batch_script_at_any_address(
    frozen: FrozenJob, address: str
) -> None:
    with node_steps.listener() as alive:
        at = (address, alive.getsockname()[1])
        environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "b"}
        assert node_steps.other_node(frozen, "a", at, ["true"], environ) == 0


def test_the_batch_script_ends_a_node_that_does_not_reach_it(
    frozen: FrozenJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall closes its port."""
    states = iter([job.RUNNING] * 5)
    monkeypatch.setattr(node_steps, "_answers", lambda _: False)
    monkeypatch.setattr(node_steps, "nodes_of", lambda _: ["a", "b"])
    answer = lambda _: job.State(next(states, "COMPLETED"), True, False)  # noqa: E731
    monkeypatch.setattr(job, "state_of", answer)
    monkeypatch.setattr(node_steps, "LOOK_S", 1.0)
    environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "b"}
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert node_steps.other_node(frozen, "a", ("a", 1), ["true"], environ) == 0
    assert len(list(states)) == 4, "it does not wait for the end of the job"


OTHER_NODE = """
import sys
from pathlib import Path
from training.launcher.slurm import node_steps
from training.launcher.slurm.submission import FrozenJob

code, port, *launch = sys.argv[1:]
environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "b"}
address = ("127.0.0.1", int(port))
sys.exit(node_steps.other_node(FrozenJob(Path(code)), "a", address, launch, environ))
"""
LAUNCHER = """
trap 'echo USR1 >>got' USR1
trap 'echo TERM >>got' TERM
echo ready >>got
until [ -e end ]; do sleep 0.05; done
exit 3
"""


@pytest.mark.parametrize(
    "send", [os.kill, os.killpg], ids=["this process", "and the launcher itself"]
)
def test_the_launcher_of_another_node_gets_a_signal_once(
    frozen: FrozenJob, tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    """By proctrack/cgroup, SLURM signals only the process that it has started; by proctrack/pgid
    its group."""
    got = tmp_path / "got"

    def lines() -> list[str]:
        return got.read_text().split() if got.exists() else []

    with node_steps.listener() as alive:
        port = str(alive.getsockname()[1])
        words = [str(frozen.code), port, "sh", "-c", LAUNCHER]
        node = subprocess.Popen(
            [sys.executable, "-c", OTHER_NODE, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            wait_until(lambda: lines() == ["ready"], 30, "the launcher")
            for count, number in enumerate((signal.SIGUSR1, signal.SIGTERM), 2):
                send(node.pid, number)
                wait_until(lambda count=count: len(lines()) == count, 10, f"signal {number}")
                time.sleep(4 * node_steps.TURN_S)  # for a second one
            (tmp_path / "end").touch()
            assert node.wait(30) == 3
        finally:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    assert lines() == ["ready", "USR1", "TERM"]


@each(
    ("script", "found"),
    [
        ("echo 'scontrol: error: a warning' >&2; echo a; echo b", ""),
        ("echo a", "a"),
        ("echo 'Invalid hostlist: a,b' >&2; exit 1", "Invalid hostlist: a,b"),
        ("exit 1", "–"),
    ],
)
def test_the_names_of_the_nodes(
    script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{script}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    load_all()
    if not found:
        assert node_steps.names_of(JOB) == ["a", "b"], "without the warning"
        return
    with pytest.raises(UserError) as refused:
        node_steps.names_of(JOB)
    (problem,) = refused.value.problems
    assert problem.what == (
        f"the job has 2 nodes, but scontrol answers for its node list 'a,b': {found}"
    )
    assert refused.value.code == 3


def test_the_other_nodes_requeue_a_job_without_its_batch_script(
    frozen: FrozenJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scontrol is replaced: the first node is removed from the job, then the job is requeued."""
    (tmp_path / "bin").mkdir()
    calls, state = tmp_path / "calls", tmp_path / "state"
    state.write_text("RUNNING")
    scontrol = tmp_path / "bin/scontrol"
    scontrol.write_text(
        f"#!/bin/sh\necho \"$@\" >>'{calls}'\n"
        'case "$1 $2" in\n'
        f"'show job') echo \"JobId=7 JobState=$(cat '{state}') NodeList=b BatchHost=a\" ;;\n"
        "'show hostnames') echo b ;;\n"
        f"'requeue 7') echo PENDING >'{state}' ;;\n"
        "esac\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(node_steps, "LOOK_S", 0.1)
    load_all()
    with socket.create_server(("127.0.0.1", 0)) as alive:
        address = ("127.0.0.1", alive.getsockname()[1])
        environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "b"}
        ask = ["sh", "-c", "exit 4"]
        assert node_steps.other_node(frozen, "a", address, ask, environ) == 4
        assert not calls.exists(), "the batch script is there"
    assert node_steps.other_node(frozen, "a", address, ask, environ) == 4
    assert calls.read_text().splitlines().count("requeue 7") == 1
