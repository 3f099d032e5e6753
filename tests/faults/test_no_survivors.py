"""No process survives a killed launcher, even if the ranks are blocked; and a second stop request
ends such ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import SCRIPTS, Launched
from tests.faults.conftest import RUN
from training.core.rundir import read_records

GONE_WITHIN_S = 8.0  # as in docs/faults.md
FAULTS = ["stop@step=5", "io@step=5", "gil@step=5", "worker_stuck@call=5"]


def faults(in_ci: str) -> pytest.MarkDecorator:
    """All of them in `make soak`, this one in every check."""
    return pytest.mark.parametrize(
        "spec",
        [
            pytest.param(f, marks=pytest.mark.slow if f == in_ci else pytest.mark.soak)
            for f in FAULTS
        ],
    )


def stuck(launch: Callable[..., Launched], spec: str) -> Launched:
    """A run in which rank 1 is blocked; the limit for that is far away."""
    run = launch(*RUN, inject=spec, hang_timeout=600, num_iterations=100000, num_workers=1)
    wait_until(
        lambda: [e for e in read_records(run.run.events) if e["event"] == "injected"],
        what="injected",
    )
    return run


@faults("io@step=5")
def test_the_launcher_is_killed(launch: Callable[..., Launched], token: str, spec: str) -> None:
    run = stuck(launch, spec)
    assert len(processes(token)) >= 3
    run.process.kill()
    wait_until(lambda: not processes(token), GONE_WITHIN_S, "no process left")


@faults("stop@step=5")
def test_ctrl_c_twice(launch: Callable[..., Launched], token: str, spec: str) -> None:
    run = stuck(launch, spec)
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.wait_for("finishing the current step")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(GONE_WITHIN_S) == 130
    wait_until(
        lambda: not processes(token), asked + GONE_WITHIN_S - time.monotonic(), "no process left"
    )


TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--local-addr=127.0.0.1", "--nproc-per-node=2"),
)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["torchrun train.py", "--launcher=torchrun", "duet watch"])
def test_torchrun_is_killed(
    launch: Callable[..., Launched], tmp_path: Path, token: str, how: str
) -> None:
    """While a rank is in a lock, and the other one waits for it."""
    fault = {"inject": "sleep@step=5", "hang_timeout": 600, "num_iterations": 100000}
    if how == "torchrun train.py":
        run = launch(*TORCHRUN, "train.py", f"--config={RUN[-1]}", **fault)
    elif how == "--launcher=torchrun":
        run = launch(*RUN, launcher="torchrun", **fault)
    else:
        flags = (f"--out_dir={tmp_path}", f"--log_dir={tmp_path}", "--report=false")
        watch = ("./duet", "watch", *flags, "--", *TORCHRUN)
        run = launch(*watch, str(SCRIPTS / "faulty.py"), "sleep", bare=True)
    wait_until(
        lambda: (
            "FAULT" in run.output
            or any(e["event"] == "injected" for e in read_records(run.run.events))
        ),
        240,
        "stuck",
    )
    (torchrun,) = (
        pid for pid, command in processes(token).items() if " -m torch.distributed.run " in command
    )
    killed = time.monotonic()
    os.kill(torchrun, signal.SIGKILL)
    wait_until(lambda: not processes(token), GONE_WITHIN_S, "no process left")
    assert run.wait(killed + GONE_WITHIN_S - time.monotonic()) != 0
