"""No process survives a killed launcher, even if the ranks are blocked; and a second stop request
ends such ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.conftest import GONE_WITHIN_S, processes, wait_until
from tests.e2e.conftest import Launched
from tests.faults.conftest import RUN
from training.core.rundir import read_records

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
        60,
        "injected",
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
