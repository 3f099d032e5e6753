"""A user script on two nodes, both of them on this machine."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launched
from tests.e2e.two_machines import Launch
from training.core.rundir import RunDir
from training.host.placement import LOOPBACK
from training.launcher.first_failure import SIGNALS_S
from training.launcher.local_ranks import free_port

pytestmark = pytest.mark.slow
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
# slower than the grace of the other ranks after a failure
STAYS = """
import atexit, os, pathlib, signal, time
here = pathlib.Path(__file__)
def save(*_):
    time.sleep(5)
    here.with_name("saved" + os.environ["RANK"]).touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 600)
    raise ValueError("planted")
time.sleep(600)
"""


def ready(run: Launched, rank: int) -> bool:
    log = run.run.rank_log(rank)
    return log.exists() and "ready" in log.read_text()


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
        wait_until(lambda run=run, rank=rank: ready(run, rank))
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


def test_a_script_that_had_failed_before_a_stop_request_saves_on_both(
    launch: Launch, tmp_path: Path
) -> None:
    """Something keeps the process of the failed rank."""
    runs = on_two_nodes(launch, tmp_path, STAYS)
    error = runs[1].run.rank_error(1)
    # else the request may have come first
    wait_until(lambda: error.exists() and time.time() - error.stat().st_mtime > SIGNALS_S)
    wait_until(lambda: ready(runs[0], 0))
    for run in runs:  # as SLURM does
        run.process.send_signal(signal.SIGTERM)
    assert [run.wait(60) for run in runs] == [4, 4], runs[0].output[-2000:]
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    for run in runs:
        assert (run.failure["rank"], run.failure["node"], run.failure["summary"]) == (
            1,
            1,
            "ValueError: planted",
        )
