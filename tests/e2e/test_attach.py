"""`./duet attach` on real torch ranks: under plain torchrun, and under Duet."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from tests.e2e.conftest import Launched, Torchrun
from training.watchdog import discovery
from training.watchdog.probes import procfs

QUICKSTART = "configs/dual_gpu/quickstart.py"
FAULTY = Path(__file__).parent / "scripts/faulty.py"


def place(text: str) -> str:
    return f"{FAULTY}:{next(number for number, line in enumerate(FAULTY.read_text().splitlines(), 1) if text in line)}"


def attach(*argv: str, cwd: Path = ROOT) -> tuple[int, str]:
    command = [sys.executable, "-m", "training.cli.supervise", "attach", *argv]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_hang_under_torchrun_is_located(torchrun: Torchrun) -> None:
    launcher, _ = torchrun(FAULTY, "sleep")
    found = discovery.of_process(launcher)
    wait_until(
        lambda: all(
            (now := procfs.read_process(pid)) and "futex" in now.waits_in for pid in found.values()
        ),
        20,
        "both have come to rest",
    )
    at = place("# the deadlock")
    for pid in (launcher, found[1]):
        code, said = attach(f"--pid={pid}")
        assert code == 5, said
        assert f"HANG rank 0 is stuck at {at} (stuck_in_a_lock), for " in said
        assert f"rank 1: waits in backward at {place('loss.backward()')} (<module>)" in said


@pytest.mark.soak
def test_a_data_loader_worker_is_named(torchrun: Torchrun) -> None:
    launcher, _ = torchrun(FAULTY, "worker", until="step 19")
    found = discovery.of_process(launcher)
    wait_until(
        lambda: all(
            (now := procfs.read_process(pid)) and now.state == "S" for pid in found.values()
        ),
        20,
        "both have come to rest",
    )
    code, said = attach(f"--pid={launcher}", "--json")
    told = json.loads(said)
    worker = told["ranks"][0]["workers"][0]["pid"]
    assert (
        code == 5
        and told["verdict"]["rank"] == 0
        and told["verdict"]["where"] == place("# the deadlock")
    )
    assert told["verdict"]["how"].startswith(
        f"waits for its data-loader worker (pid {worker}), which is stuck at "
    )


@pytest.mark.soak
def test_a_healthy_training_has_no_hang(torchrun: Torchrun) -> None:
    launcher, _ = torchrun(FAULTY, "ok", until="step 5")
    code, said = attach(f"--pid={launcher}")
    assert code == 0 and said.splitlines()[-1].startswith("no hang: "), said


@pytest.mark.soak
def test_an_evaluation_on_one_rank(torchrun: Torchrun) -> None:
    launcher, _ = torchrun(FAULTY, "slow_eval", "60")
    code, said = attach(f"--pid={launcher}")
    assert code == 0, said
    assert "rank 1 waits in barrier" in said.splitlines()[-1] and "(evaluate)" in said


@pytest.mark.soak
def test_a_script_under_duet(launch: Callable[..., Launched], tmp_path: Path) -> None:
    flags = [
        "--run_name=stuck",
        f"--out_dir={tmp_path / 'experiments'}",
        f"--log_dir={tmp_path / 'logs'}",
        "--hang_timeout=0",
    ]
    run = launch(
        "./launch_train.sh",
        "2",
        *flags,
        "--script",
        str(FAULTY),
        "--",
        "sleep",
        name="stuck",
        bare=True,
    )
    run.wait_for("FAULT")
    wait_until(
        lambda: all(
            (now := procfs.read_process(pid)) and "futex" in now.waits_in
            for pid in run.pids.values()
        ),
        20,
        "both have come to rest",
    )
    code, said = attach(f"--run={run.run.path}")
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    assert (
        code == 5
        and f"HANG rank 0 is stuck at {place('# the deadlock')} (stuck_in_a_lock), for " in said
    ), said


@pytest.mark.soak
def test_duets_training_shows_its_phases(launch: Callable[..., Launched]) -> None:
    run = launch("./train_dual_gpu.sh", QUICKSTART, num_iterations=100000)
    wait_until(lambda: len(run.steps) > 3, what="it trains")
    code, said = attach(f"--run={run.run.path}")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    assert code == 0 and "no hang: " in said, said
    for rank, pid in run.pids.items():
        assert f"rank {rank}  pid {pid}  " in said
    assert re.search(r"; epoch \d+, \S.*, for [\d.]+ s\n", said)
