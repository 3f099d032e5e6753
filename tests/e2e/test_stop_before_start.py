"""Stop signals on several machines before any rank was started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.test_fewer_machines import Launch, starter

SIGNALS = [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 75, "SIGTERM")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number", "code", "name"),
    [
        pytest.param(
            target,
            *case,
            marks=() if (target, case[1]) == (0, 130) else pytest.mark.soak,
            id=f"{case[2]} on node {target}",
        )
        for target in (0, 1)
        for case in SIGNALS
    ],
)
def test_a_stop_ends_every_machine_with_the_same_code(
    launch: Launch,
    token: str,
    tmp_path: Path,
    target: int,
    number: signal.Signals,
    code: int,
    name: str,
) -> None:
    """Node 0 waits for node 2, node 1 for node 0; both have the same folder."""
    start = starter(launch, tmp_path, 3, rendezvous_timeout=120)
    runs = [start(0), start(1)]
    runs[0].wait_for("node 1 has joined", 120)
    if number == signal.SIGINT:  # otherwise node 1 may still prepare its data
        runs[1].wait_for("waiting for node 0 (127.0.0.1", 120)
    runs[target].process.send_signal(number)
    assert [run.wait(60) for run in runs] == [code, code], runs[0].output + runs[1].output
    assert f"node {target}" in (told := runs[1 - target].output) and f"stopped by {name}" in told
    assert not any((tmp_path / "experiments").glob("*")), "nothing was started"
    assert not processes(token)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_node_0_alone(
    launch: Launch, token: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = starter(launch, tmp_path, 2)(0)
    run.wait_for("waiting for node 1")
    run.process.send_signal(number)
    assert run.wait(60) == code
    assert run.output.count("before the start") == 1, run.output
    assert not any((tmp_path / "experiments").glob("*"))


@pytest.mark.soak
def test_a_machine_that_waits_for_node_0_makes_no_plan_after_its_end(
    launch: Launch, token: str, tmp_path: Path
) -> None:
    """The launch script waits for its plan, which waits for node 0."""

    def planner() -> list[int]:
        return [pid for pid, command in processes(token).items() if "training.cli.plan" in command]

    start = starter(launch, tmp_path, 2)
    run = start(1)
    run.wait_for("waiting for node 0")
    for pid in planner():
        os.kill(pid, signal.SIGTERM)
    assert run.wait(60) == 75 and run.output.count("before the start") == 1, run.output

    run = start(1)
    run.wait_for("waiting for node 0")
    run.process.kill()
    wait_until(lambda: not processes(token), 10, "its plan has ended too")
