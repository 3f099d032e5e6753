"""`./duet inspect` on real torch ranks: of a Duet run, and of a script under plain torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, wait_until
from tests.e2e.conftest import Launched, Torchrun
from training.watchdog import discovery
from training.watchdog.probes import procfs

pytestmark = pytest.mark.slow
QUICKSTART = "configs/dual_gpu/quickstart.py"
FAULTY = Path(__file__).parent / "scripts/faulty.py"
STEADY = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 256)).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
"""


def inspect(*argv: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "training.cli.inspect", *argv, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


def of(told: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in told["checks"] if check["name"] == name)


def test_a_duet_run(launch: Callable[..., Launched]) -> None:
    run = launch(
        "./train_dual_gpu.sh", QUICKSTART, num_iterations=100_000, inspect_every=5, hang_timeout=0
    )
    wait_until(lambda: len(run.steps) > 6, what="it trains")
    path, pids = str(run.run.path), run.pids

    code, told = inspect(path)
    assert code == 0 and told["text"].startswith("YES: all 2 ranks train (step "), told
    # the machine may be busy
    assert {c["name"] for c in told["checks"] if c["status"] != "ok"} <= {
        "speed",
        "memory",
        "attention",
    }, told
    assert [(r["rank"], r["pid"], r["step"] > r["step_before"]) for r in told["ranks"]] == [
        (0, pids[0], True),
        (1, pids[1], True),
    ]
    assert "; disjoint and complete, verified for " in of(told, "data")["text"]
    assert of(told, "parameters")["text"].startswith("equal on all ranks at step ")

    os.kill(pids[1], signal.SIGSTOP)
    wait_until(
        lambda: (now := procfs.read_process(pids[1])) and now.state == "T", 20, "it is stopped"
    )
    code, told = inspect(path)
    assert (code, told["text"]) == (
        5,
        f"NO: rank 1 is stopped (SIGSTOP); resume: kill -CONT {pids[1]}",
    )
    os.kill(pids[1], signal.SIGCONT)

    code, told = inspect(f"--pid={pids[1]}")  # the run is found by its PID
    assert code == 0 and told["run"]["dir"] == path and told["run"]["state"] == "running", told

    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    code, told = inspect(path)
    assert code == 5 and told["text"].startswith("IT HAS ENDED: stopped at step "), told


@pytest.mark.soak
def test_a_finished_run(launch: Callable[..., Launched]) -> None:
    run = launch("./train_dual_gpu.sh", QUICKSTART, num_iterations=3).ok()
    code, told = inspect(str(run.run.path))
    assert code == 0 and told["text"].startswith("IT HAS ENDED: finished at step 3 of 3, "), told


def test_a_training_under_torchrun(torchrun: Torchrun, tmp_path: Path) -> None:
    script = tmp_path / "steady.py"
    script.write_text(STEADY)
    launcher, console = torchrun(script, until="step 20 ")
    code, told = inspect(f"--pid={launcher}")
    assert code == 0 and told["text"].startswith("YES: all 2 ranks are at work (step "), told
    assert [r["pid"] for r in told["ranks"]] == list(discovery.of_process(launcher).values())
    assert of(told, "processes")["text"].startswith("2 of 2 by WORLD_SIZE: ") and of(told, "log")[
        "text"
    ].endswith(f" in {console}")


@pytest.mark.soak
def test_a_hang_under_torchrun_is_located(torchrun: Torchrun) -> None:
    launcher, _ = torchrun(FAULTY, "sleep", until="FAULT")
    found = discovery.of_process(launcher)
    wait_until(
        lambda: all(
            (now := procfs.read_process(pid)) and "futex" in now.waits_in for pid in found.values()
        ),
        20,
        "both have come to rest",
    )
    line = next(
        number
        for number, text in enumerate(FAULTY.read_text().splitlines(), 1)
        if "# the deadlock" in text
    )
    code, told = inspect(f"--pid={found[1]}")
    assert code == 5 and told["text"].startswith("NO: rank 0 "), told
    assert f"{FAULTY}:{line} (stuck_in_a_lock), for " in told["text"], told
    assert [r["waits_in"] for r in told["ranks"]] == [None, "backward"]


@pytest.mark.soak
def test_a_script_under_duet(launch: Callable[..., Launched], tmp_path: Path) -> None:
    script = tmp_path / "steady.py"
    script.write_text(STEADY)
    flags = [
        "--run_name=steady",
        f"--out_dir={tmp_path / 'experiments'}",
        f"--log_dir={tmp_path / 'logs'}",
    ]
    run = launch(
        "./launch_train.sh", "2", *flags, "--script", str(script), name="steady", bare=True
    )
    run.wait_for("step 20 ")
    code, told = inspect(str(run.run.path))
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    assert code == 0 and told["text"].startswith("YES: all 2 ranks are at work (step "), told
    assert all(r["collectives"] > r["collectives_before"] for r in told["ranks"]), told["ranks"]
    run.wait()
