"""`duet watch`: the ranks of another launcher are found and watched; its exit status is passed on."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import PEERS, SCRIPTS, Launched
from tests.e2e.test_script_stop import SPAWNS, TRAIN
from training.core.rundir import read_json, read_records
from training.launcher.local_ranks import free_port

Watch = Callable[..., Launched]
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--local-addr=127.0.0.1", "--nproc-per-node=2"),
)


@pytest.fixture
def watch(launch: Callable[..., Launched], tmp_path: Path) -> Watch:
    """Watches a command; `timeout`: --hang_timeout."""

    def start(*command: str, timeout: int = 300, **env: str) -> Launched:
        flags = {
            "run_name": "run",
            "out_dir": tmp_path / "experiments",
            "log_dir": tmp_path / "logs",
            "report": "false",
            "hang_timeout": timeout,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        return launch("./duet", "watch", *words, "--", *command, name="run", bare=True, env=env)

    return start


@pytest.mark.slow
def test_a_hung_rank_of_torchrun_is_named(watch: Watch, token: str) -> None:
    faulty = SCRIPTS / "faulty.py"
    run = watch(*TORCHRUN, str(faulty), "sleep", timeout=3)
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = (e for e in read_records(run.run.events) if e["event"] == "verdict")
    assert (verdict["kind"], verdict["rank"]) == ("hang", 0)
    assert verdict["where"].startswith(str(faulty)) and list(verdict["waiting"]) == ["1"]
    assert (run.failure["cause"], run.failure["exit_code"]) == ("hang", 5)
    ranks = (read_json(run.run.supervisor) or {})["ranks"]
    assert [entry["rank"] for entry in ranks] == [None, 0, 1], "for the monitor"
    wait_until(lambda: not processes(token), 8, "everybody gone")


@pytest.mark.soak
def test_the_training_that_a_python_wrapper_starts_is_named(watch: Watch, tmp_path: Path) -> None:
    faulty, wrapper = SCRIPTS / "faulty.py", tmp_path / "wrapper.py"
    wrapper.write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)\n"
    )
    run = watch(*TORCHRUN, str(wrapper), str(faulty), "sleep", timeout=3)
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = (e for e in read_records(run.run.events) if e["event"] == "verdict")
    assert (verdict["kind"], verdict["rank"]) == ("hang", 0)
    assert verdict["where"].startswith(str(faulty)) and list(verdict["waiting"]) == ["1"]


# The ranks get their variables inside their process.
SPAWN = """
import os, signal, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    if rank == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    file, method = tempfile.mktemp(), sys.argv[1]
    if method == "os.fork":
        main(int(os.fork() == 0), file)
    mp.start_processes(main, args=(file,), nprocs=2, start_method=method)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "method"),
    [
        *(((sys.executable,), method) for method in ("spawn", "fork", "forkserver", "os.fork")),
        ((*TORCHRUN, "--nproc-per-node=1"), "spawn"),
    ],
)
def test_a_hung_rank_of_the_programs_own_is_named(
    watch: Watch, tmp_path: Path, token: str, launcher: tuple[str, ...], method: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWN)
    run = watch(*launcher, str(script), method, timeout=3)
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = (e for e in read_records(run.run.events) if e["event"] == "verdict")
    assert (verdict["kind"], verdict["rank"]) == ("hang", 1)
    assert verdict["where"] == f"{script}:8" and list(verdict["waiting"]) == ["0"]
    wait_until(lambda: not processes(token), 8, "everybody gone")


@pytest.mark.soak
def test_the_exit_status_of_the_command_is_passed_on(watch: Watch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('planted')\n")
    run = watch(*TORCHRUN, str(script))
    assert run.wait() == 1, run.output[-3000:]
    assert (run.failure["cause"], run.failure["exit_code"]) == ("exception", 1)
    assert run.failure["summary"] == "ValueError: planted"
    assert run.failure["where"] == f"{script}:3"


# The first one fails before its peer can notice; the second one does not exit.
FAILS = {
    "no exit status": "time.sleep(4)\nif rank:\n    raise ValueError('planted')\n",
    "a thread": """
dist.init_process_group("gloo")
if rank:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("planted")
dist.barrier()
""",
}


@pytest.mark.soak
@pytest.mark.parametrize("how", FAILS)
def test_a_rank_that_fails_while_the_others_wait_is_the_cause(
    watch: Watch, tmp_path: Path, token: str, how: str
) -> None:
    """The launcher does not notice it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, threading, time\nimport torch.distributed as dist\n"
        f"rank = int(os.environ['RANK'])\n{FAILS[how]}dist.init_process_group('gloo')\n"
    )
    ranks = f'for r in 0 1; do RANK=$r LOCAL_RANK=$r "{sys.executable}" "$0" & done; wait'
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    run = watch("sh", "-c", ranks, str(script), timeout=3, WORLD_SIZE="2", **place)
    assert run.wait() == 4, run.output[-3000:]
    assert (run.failure["cause"], run.failure["rank"]) == ("exception", 1)
    assert (run.failure["summary"], run.failure["exit_code"]) == ("ValueError: planted", 4)
    wait_until(lambda: not processes(token), 8, "everybody gone")


# Rank 1 leaves by itself, and its peer loses the connection.
LEAVES = """
import tempfile, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for step in range(80):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    if rank == 0:
        dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    mp.spawn(main, args=(tempfile.mktemp(),), nprocs=2)
"""


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_rank_that_leaves_early_is_the_cause(watch: Watch, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES)
    torchrun, guilty = launcher == "torchrun", 0 if launcher == "torchrun" else 1
    faulty = (*TORCHRUN, str(SCRIPTS / "faulty.py"), "exit0")
    run = watch(*(faulty if torchrun else (sys.executable, str(script))))
    assert run.wait() == 1, run.output[-3000:]
    assert (run.failure["cause"], run.failure["rank"]) == ("exit_status", guilty)
    assert (run.failure["status"], run.failure["victim"]) == (0, False)
    (verdict,) = (e for e in read_records(run.run.events) if e["event"] == "verdict")
    assert (verdict["kind"], verdict["rank"]) == ("died", guilty)


@pytest.mark.soak
@pytest.mark.parametrize("status", [0, 3])
def test_a_command_without_ranks(watch: Watch, status: int) -> None:
    run = watch("sh", "-c", f'echo "$PET_NNODES"; exit {status}', PET_NNODES="kept")
    assert run.wait() == status and "kept" in run.output


@pytest.mark.soak
def test_a_stop_request_reaches_the_ranks(watch: Watch, tmp_path: Path, token: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    run = watch(*TORCHRUN, str(script))
    run.wait_for("ready")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(60) == 75
    wait_until(lambda: not processes(token), 8, "everybody gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGUSR1, "torchrun"), (signal.SIGTERM, "shell script")]
)
def test_ranks_below_another_launcher_save_at_a_stop_request(
    watch: Watch, tmp_path: Path, number: int, how: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = (*TORCHRUN, str(script), str(tmp_path), "1")
    if how == "shell script":
        command = ("bash", "-c", f"{shlex.join(command)}; echo ended with $?")
    run = watch(*command)
    wait_until(lambda: run.output.count("ready") == 2, what="both ranks")
    run.process.send_signal(number)
    assert run.wait() == 75
    assert all((tmp_path / f"saved{rank}.1").exists() for rank in range(2)), run.output[-3000:]
    assert ("ended with" in run.output) == (how == "shell script")
    assert "left behind" not in run.output


@pytest.mark.soak
def test_spawned_ranks_save_at_a_stop_request(watch: Watch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    run = watch(sys.executable, str(script), str(tmp_path), str(free_port("127.0.0.1")))
    wait_until(lambda: "ready 0" in run.output and "ready 1" in run.output, what="both ranks")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    assert all((tmp_path / name).exists() for name in ("saved0", "saved1", "exported"))


@pytest.mark.soak
def test_accelerate_launch(watch: Watch, tmp_path: Path) -> None:
    if not PEERS.is_dir():
        pytest.skip("accelerate is missing: make peers")
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
        *("--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
    ]
    words = [str(SCRIPTS / "with_accelerate.py"), str(tmp_path / "end")]
    run = watch(*command, *words, PYTHONPATH=str(PEERS))
    # gloo aborts some processes after their end
    assert run.wait() == 0 or "terminate called without" in run.output, run.output[-3000:]
    ends = [(tmp_path / f"end{rank}").read_text().split() for rank in range(2)]
    assert [end[:2] for end in ends] == [["2", "0"], ["2", "1"]]
    assert "watching 2 ranks of" in run.output
