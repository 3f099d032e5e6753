"""A user script that hangs under the launcher: rank and place are found within seconds; a slow one
is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launched, Script
from training.core.messages import templates
from training.core.rundir import read_records
from training.launcher.local_ranks import free_port

FAULTY = Path(__file__).parent / "scripts/faulty.py"
FLOOR_S = 3
LIMIT_S = 6.0
SPIN_LIMIT_S = 5 * FLOOR_S + 4.0  # long work looks the same
BUSY_S = 60.0  # beside other tests in CI; make soak has the limits
Faulty = Callable[..., Launched]


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


def line(text: str) -> str:
    return f"{FAULTY}:{next(number for number, one in enumerate(FAULTY.read_text().splitlines(), 1) if text in one)}"


@pytest.fixture
def faulty(launch: Callable[..., Launched], tmp_path: Path) -> Faulty:
    def start(
        *args: str, ranks: int = 2, env: dict[str, str] | None = None, **flags: object
    ) -> Launched:
        own = {
            "run_name": "run",
            "out_dir": tmp_path / "experiments",
            "log_dir": tmp_path / "logs",
            "hang_timeout": FLOOR_S,
        } | flags
        words = [
            "./launch_train.sh",
            str(ranks),
            *(f"--{k}={v}" for k, v in own.items()),
            "--script",
            str(FAULTY),
            "--",
            *args,
        ]
        return launch(*words, name="run", bare=True, env=env)

    return start


def verdicts(run: Launched) -> list[dict[str, Any]]:
    return [e for e in read_records(run.run.events) if e["event"] == "verdict"]


def warnings(run: Launched) -> list[dict[str, Any]]:
    return [e for e in read_records(run.run.events) if e["event"] == "warning"]


def fault_time(run: Launched) -> float:
    logs = "".join(run.run.rank_log(rank).read_text() for rank in range(2))
    found = re.search(r"^FAULT ([\d.]+)", logs, re.MULTILINE)
    assert found, logs
    return float(found[1])


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "where", "how"),
    [
        ("sleep", "hang", 0, "# the deadlock", r"is stuck at .* \(stuck_in_a_lock\)"),
        soak("spin", "hang", 0, "turns += 1", r"spins at .* \(endless_loop\), and holds the GIL"),
        soak("gil", "hang", 0, "ctypes.PyDLL", r"holds the GIL in C, called at .* \(at_fault\)"),
        soak(
            "stop",
            "stopped",
            0,
            "signal.SIGSTOP)",
            r"is stopped \(SIGSTOP; resume: kill -CONT \d+\)",
        ),
        soak(
            "worker",
            "hang",
            0,
            "# the deadlock",
            r"waits for its data-loader worker \(pid \d+\), which is stuck at .* \(stuck_in_a_lock\)",
        ),
    ],
)
def test_the_stuck_rank_and_its_place(
    faulty: Faulty, fault: str, kind: str, rank: int, where: str, how: str
) -> None:
    run = faulty(fault)
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = verdicts(run)
    assert (verdict["kind"], verdict["rank"]) == (kind, rank), verdict
    if fault == "spin":  # any line of the loop
        assert int(verdict["where"].rpartition(":")[2]) - int(line(where).rpartition(":")[2]) in (
            -1,
            0,
        )
    else:
        assert verdict["where"] == line(where)
    assert re.search(how, verdict["text"]), verdict
    assert verdict["waiting"] == {"1": f"waits in backward at {line('loss.backward()')} (<module>)"}
    limit_s = {"sleep": BUSY_S, "spin": SPIN_LIMIT_S}.get(fault, LIMIT_S)
    assert verdict["time"] - fault_time(run) < limit_s
    assert ("an endless loop or long work" in run.output) == (fault == "spin"), (
        "reported before the end"
    )
    failure = run.failure
    assert (failure["cause"], failure["rank"], failure["where"]) == ("hang", rank, verdict["where"])
    assert ("may_end" in failure) == (fault == "spin"), "or long work"


@pytest.mark.slow
def test_the_stuck_rank_is_named_if_torchs_own_timeout_comes_first(faulty: Faulty) -> None:
    run = faulty("sleep", env={"GROUP_TIMEOUT_S": "15"}, hang_timeout=0)
    assert run.wait() == 4, run.output[-3000:]
    failure = run.failure
    assert (failure["cause"], failure["kind"]) == ("collective_timeout", "error")
    assert (failure["rank"], failure["where"]) == (0, line("# the deadlock"))
    assert failure["victim"] and set(failure["waiting"]) == {"1"}
    assert Path(failure["stacks"], "rank0.txt").exists()
    assert [(v["kind"], v["rank"]) for v in verdicts(run)] == [("error", 0)]


# Starts its ranks itself, by torch.multiprocessing or torchrun.
STARTS_RANKS = """
import os, signal, subprocess, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    how, port = sys.argv[1:]
    if how == "rank":
        main(int(os.environ["RANK"]), os.environ["MASTER_PORT"])
    elif how == "spawn":
        mp.spawn(main, (port,), nprocs=2)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        subprocess.run([*launcher, f"--master_port={port}", __file__, "rank", port])
"""


@pytest.mark.parametrize("how", [pytest.param("spawn", marks=pytest.mark.slow), soak("torchrun")])
def test_a_stuck_rank_that_the_only_rank_has_started(
    launch: Callable[..., Launched], tmp_path: Path, how: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STARTS_RANKS)
    flags = {"run_name": "run", "device": "cpu", "hang_timeout": FLOOR_S}
    flags |= {"out_dir": tmp_path / "experiments", "log_dir": tmp_path / "logs"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    command = ["./duet", "run", "-n", "1", *words, str(script), how, str(free_port("127.0.0.1"))]
    run = launch(*command, name="run", bare=True)
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = verdicts(run)
    assert (verdict["kind"], verdict["rank"]) == ("hang", 1)
    assert verdict["where"] == f"{script}:9" and list(verdict["waiting"]) == ["0"]
    assert (run.failure["cause"], run.failure["rank"]) == ("hang", 1)
    assert run.failure["log"] == str(run.run.rank_log(0))
    left = templates("launcher")["launcher.limits.left_behind"]["en"].partition("{")[0]
    assert left and left not in run.output


@pytest.mark.slow
def test_uneven_batches(faulty: Faulty) -> None:
    run = faulty("uneven")
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = verdicts(run)
    assert (verdict["kind"], verdict["rank"]) == ("uneven", None)
    assert all(f"rank {rank}: 19" in verdict["text"] for rank in range(2)), "the last printed step"
    places = {rank: place.partition(" at ")[0] for rank, place in verdict["waiting"].items()}
    assert places == {"0": "waits in barrier", "1": "waits in backward"}
    assert verdict["time"] - fault_time(run) < BUSY_S


@pytest.mark.slow
def test_a_rank_that_exits_early_is_named_and_not_the_one_that_lost_it(faulty: Faulty) -> None:
    run = faulty("exit0")
    assert run.wait() == 4, run.output[-3000:]
    assert (
        run.failure["rank"] == 0
        and run.failure["summary"] == "exited with status 0 in the middle of the training"
    )
    assert [(v["kind"], v["rank"]) for v in verdicts(run)] == [("died", 0)]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("slow_eval", marks=pytest.mark.slow),
        soak("upload"),
        soak("quiet"),
        soak("slow_data"),
    ],
)
def test_a_slow_script_is_left_alone(faulty: Faulty, fault: str) -> None:
    run = faulty(fault, str(5 * FLOOR_S))
    assert run.wait() == 0, run.output[-3000:]
    assert verdicts(run) == []
    # One rank of slow_data keeps the others waiting: reported if it lasts long enough, as it is.
    slow = [("warning.slow_rank", 0)] if fault == "slow_data" else []
    assert [(e["code"], e.get("rank")) for e in warnings(run)] in ([], slow)


@pytest.mark.soak
def test_long_work_before_the_first_step_causes_only_a_warning(faulty: Faulty) -> None:
    """In one Python function, while the other rank waits at a barrier: indistinguishable from an
    endless loop."""
    run = faulty("prepare", "16", hang_timeout=1)
    assert run.wait() == 0, run.output[-3000:]
    assert verdicts(run) == [] and "no step has been printed yet" in run.output


SLOW = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(int(os.environ["STEPS"])):
    seconds = 0.05 if dist.get_rank() == 1 else 0.01
    time.sleep(seconds)  # the only work, so that each sample of rank 1 is here
    dist.all_reduce(torch.ones(8))
    print(f"step {step} loss 0.5", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_slow_rank_is_named(script: Script) -> None:
    run = script(SLOW, flags={"hang_timeout": FLOOR_S}, env={"STEPS": "440"}).ok()
    warned = warnings(run)
    assert [(e["code"], e["rank"]) for e in warned] == [("warning.slow_rank", 1)]
    assert "my script.py:7 " in warned[0]["text"] and warned[0]["text"] in run.output
