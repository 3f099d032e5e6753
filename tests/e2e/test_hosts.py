"""Several machines from one command: a real sshd on loopback is all machines."""

from __future__ import annotations

import os
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import nobody_left, processes, wait_until
from tests.e2e import sshd
from tests.e2e.conftest import Launched
from training.core.rundir import read_json, read_records

SCRIPT, CONFIG = "./launch_train.sh", "configs/dual_gpu/quickstart.py"
LOST_S = 40.0  # lib/host_agent.py ends a machine that the run can lose, after its launcher, before
SECRET = f"secret-{uuid.uuid4().hex}"
Launch = Callable[..., Launched]

PROGRAM = """\
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
assert os.environ["MY_DATA"] == "a 'b'" and os.path.exists("main.py")
print("rank", rank, flush=True)
print("only on", rank, file=sys.stderr, flush=True)
dist.barrier()
if os.environ.get("FAILS") == str(rank):
    raise ValueError("boom")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Server]:
    if why := sshd.missing():
        pytest.skip(why)
    with sshd.server(tmp_path_factory.mktemp("ssh d"), uuid.uuid4().hex) as started:
        yield started


@pytest.fixture
def machines(server: sshd.Server, launch: Launch) -> Iterator[Launch]:
    """Starts a script of the project with --hosts; nothing of its sessions may be left."""

    def start(*command: str, hosts: str = "alpha,beta", **more: object) -> Launched:
        return launch(*command, hosts=hosts, ssh_args=server.arguments, **more)

    yield start
    nobody_left(server.token)


@pytest.fixture
def script(machines: Launch, project: Path, tmp_path: Path) -> Callable[..., Launched]:
    """Starts PROGRAM on this machine and another one."""

    def start(**env: str) -> Launched:
        (tmp_path / "main.py").write_text(PROGRAM)
        own = (str(project / SCRIPT), "1", "--script", "main.py")
        more = {"cwd": tmp_path, "env": {"MY_DATA": "a 'b'", **env}, "tiny": False}
        return machines(*own, hosts="localhost,beta", device="cpu", **more)

    return start


def commands() -> str:
    """The command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def stepping(run: Launched) -> None:
    wait_until(lambda: run.steps or run.process.poll() is not None, what="a step")
    assert run.steps, run.output


def launcher(run: Launched) -> int:
    """It replaces the shell, so it has its PID."""
    command = Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
    assert b"training.cli.hosts" in command
    return run.process.pid


def supervisor(token: str, node: int) -> int:
    """The launcher of one of two machines: it has replaced the shell there."""
    return next(
        pid
        for pid, command in processes(token).items()
        if "training.cli.supervise" in command and ("--node=1" in command) == (node == 1)
    )


@pytest.mark.slow
def test_one_command_trains_on_two_machines_and_ctrl_c_stops_both(machines: Launch) -> None:
    run = machines(SCRIPT, "1", CONFIG, num_iterations=100000, env={"API_KEY": SECRET})
    stepping(run)
    assert SECRET not in commands(), "it goes over standard input"
    assert SECRET in Path(f"/proc/{run.pids[0]}/environ").read_text()
    os.kill(launcher(run), signal.SIGINT)
    assert run.wait() == 130
    assert "mode node 0 of 2, the first is 127.0.0.1:" in run.output
    assert "node 1 has joined" in run.output
    assert list((run.run.path / "checkpoints").glob("step_*")), "the step is completed and saved"
    resume = next(line for line in run.output.splitlines() if line.startswith("  Resume"))
    assert {"--hosts=alpha,beta", "1"} <= set(shlex.split(resume)), "it starts both again"


@pytest.mark.soak
def test_a_script_runs_here_and_on_another_machine(script: Callable[..., Launched]) -> None:
    run = script().ok()
    lines = run.output.splitlines()
    assert "rank 0" in lines and "rank 1" not in run.output
    assert "rank 1\n" in run.run.rank_log(1).read_text(), "on the disk that both have"
    assert read_json(run.run.summary) == run.summary | {"status": "finished", "ranks": 2}


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_on_any_machine(machines: Launch, token: str) -> None:
    run = machines(SCRIPT, "1", CONFIG, hosts="localhost,beta", num_iterations=100000)
    stepping(run)
    os.kill(launcher(run), signal.SIGKILL)
    run.wait()
    wait_until(lambda: not processes(token), 30, "both machines have stopped")
    assert list((run.run.path / "checkpoints").glob("step_*")), "stopped on request"


@pytest.mark.soak
def test_a_lost_connection_stops_the_run(machines: Launch, token: str) -> None:
    run = machines(SCRIPT, "1", CONFIG, num_iterations=100000)
    stepping(run)
    links = {pid: command for pid, command in processes(token).items() if "ssh -T" in command}
    os.kill(next(pid for pid, command in links.items() if "beta" in command), signal.SIGKILL)
    assert run.wait() == 4
    assert "the ssh connection to beta (node 1) was lost" in run.output


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_launcher_of_one_machine_is_a_failed_run(
    machines: Launch, token: str, node: int
) -> None:
    """As by the OOM killer."""
    run = machines(SCRIPT, "1", CONFIG, num_iterations=100000)
    stepping(run)
    os.kill(supervisor(token, node), signal.SIGKILL)
    assert run.wait() == 4
    assert f"node {node} (" in run.output and "peer_died" in run.output


@pytest.mark.soak
def test_a_node_that_cannot_start_ends_the_others(machines: Launch, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("text\n" * 100000)  # in the home of this machine alone
    run = machines(
        SCRIPT, "1", CONFIG, hosts="localhost,beta", data="~/own.txt", env={"HOME": str(tmp_path)}
    )
    assert run.wait() == 2, run.output
    assert "[beta] [ERROR]" in run.output and "own.txt" in run.output


@pytest.mark.soak
def test_a_failed_rank_is_reported_once(script: Callable[..., Launched]) -> None:
    run = script(FAILS="1")
    assert run.wait() == 4
    assert run.output.count(" training failed") == 1
    assert run.failure["rank"] == 1 and run.failure["node"] == 1


def test_all_machines_are_examined_before_the_start(machines: Launch) -> None:
    names = "alpha,unverified,refused,nowhere,locked"
    run = machines(SCRIPT, "1", CONFIG, hosts=names, total_batch_size=640)
    assert run.wait() == 3
    found = [line.split(" ", 3)[3] for line in run.output.splitlines() if "[ERROR]" in line]
    assert [text.partition(":")[0] for text in found[:-1]] == names.split(",")[1:], run.output
    assert not run.run.path.exists()


@pytest.mark.soak
@pytest.mark.parametrize(("lost", "name"), [(1, "beta"), (0, "alpha")])
def test_a_lost_machine_is_started_again(
    machines: Launch, token: str, lost: int, name: str
) -> None:
    """With --min_ranks the run continues without it, and takes it back."""
    flags = {"num_iterations": 100000, "save_every": 20, "min_ranks": 1}
    run = machines(SCRIPT, "1", CONFIG, **flags)
    stepping(run)
    links = {pid: command for pid, command in processes(token).items() if "ssh -T" in command}
    os.kill(supervisor(token, lost), signal.SIGKILL)
    os.kill(next(pid for pid, command in links.items() if name in command), signal.SIGKILL)

    def restarts() -> list[list[int]]:
        return [r["ranks"] for r in read_records(run.run.events) if r["event"] == "restart"]

    wait_until(lambda: restarts() == [[2, 1], [1, 2]], 120, "it is back")
    wait_until(
        lambda: sum(r["event"] == "recovered" for r in read_records(run.run.events)) == 2, 60
    )
    assert f"{name} (node {lost}) has left the run" in run.output
    assert ("has taken over the run" in run.output) == (lost == 0)
    os.kill(launcher(run), signal.SIGINT)
    assert run.wait() == 130


@pytest.mark.soak
def test_the_run_continues_without_the_first_machine_and_the_launcher_there(
    machines: Launch, token: str
) -> None:
    flags = {"num_iterations": 100000, "save_every": 20, "min_ranks": 1}
    run = machines(SCRIPT, "1", CONFIG, hosts="localhost,beta", **flags)
    stepping(run)
    second = supervisor(token, 1)
    os.kill(launcher(run), signal.SIGSTOP)  # so no machine hears of the loss
    os.kill(supervisor(token, 0), signal.SIGKILL)
    os.kill(launcher(run), signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: time.monotonic() - killed > LOST_S, 60)
    assert second in processes(token)
    assert "takeover" in [r["event"] for r in read_records(run.run.events)]
    os.kill(second, signal.SIGINT)
    wait_until(lambda: not processes(token), 60, "it has stopped")
    assert run.summary["status"] == "stopped"


@pytest.mark.soak
def test_a_first_machine_without_ranks_is_not_the_end(machines: Launch) -> None:
    """The device of its only rank fails: it hands the run over, and is started again."""
    flags = {"num_iterations": 100000, "save_every": 20, "min_ranks": 1}
    run = machines(SCRIPT, "1", CONFIG, **flags, inject="ecc@rank=0,step=25")

    def restarts() -> list[list[int] | None]:
        return [r.get("ranks") for r in read_records(run.run.events) if r["event"] == "restart"]

    wait_until(lambda: restarts() == [[2, 1], [1, 2]], 180, "it is back")
    assert "alpha (node 0) has left the run" in run.output
    os.kill(launcher(run), signal.SIGINT)
    assert run.wait() == 130
