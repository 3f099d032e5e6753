"""Jobs with --min_ranks: a node whose launcher is killed, and nodes that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.hooks import in_forward
from tests.slurm.cluster import ASK_EVERY_S, Cluster, missing, running
from tests.slurm.conftest import User, flags, losses
from training.core.rundir import read_json, read_records

pytestmark = pytest.mark.soak
FLAGS = flags(num_iterations=1000000, save_every=20, min_ranks=1)
LIMIT_S = 180.0  # busy cores take several times as long
NODE_DOWN_S = 60  # slurmctld looks every SlurmdTimeout / 2, and then waits for two answers


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Another SLURM, which soon notices a failed node."""
    if lacking := missing():
        pytest.skip(f"SLURM is not installed (apt-get install slurm-wlm): no {', '.join(lacking)}")
    with running(tmp_path_factory.mktemp("slurm"), timeout_s=10) as cluster:
        yield cluster


def restarts(user: User) -> list[dict[str, Any]]:
    return [event for event in read_records(user.run().events) if event["event"] == "restart"]


def wait_step(user: User, more: int = 10) -> None:
    """Wait until the run has trained `more` steps."""
    step = max(losses(user.run()), default=0)
    wait_until(lambda: max(losses(user.run()), default=0) >= step + more, LIMIT_S, "more steps")


def wait_ranks(user: User, before: int, after: int) -> None:
    wait_until(
        lambda: [r["ranks"] for r in restarts(user) if "ranks" in r][-1:] == [[before, after]],
        LIMIT_S,
        f"{before} → {after} ranks",
    )
    wait_step(user)


def launcher(token: str, node: int) -> int:
    (found,) = [
        pid
        for pid, command in processes(token).items()
        if "training.cli.supervise" in command and f"--node={node}" in command
    ]
    return found


def test_the_run_survives_a_killed_launcher_and_a_failed_node(user: User, token: str) -> None:
    job = user.submit("--nodes=2", ranks=1, flags=FLAGS)
    user.wait_log(job, "Iter: 25,")

    os.kill(launcher(token, 1), signal.SIGKILL)
    wait_ranks(user, 2, 1)
    wait_ranks(user, 1, 2)  # started again by the batch script

    user.slurm.fail_node(1)
    wait_ranks(user, 2, 1)
    wait_until(
        lambda: user.slurm.facts(job)["NodeList"] == "n0", NODE_DOWN_S, "n1 removed", ASK_EVERY_S
    )
    user.wait_log(job, "n1 (node 1) has failed")
    assert user.slurm.facts(job)["JobState"] == "RUNNING"
    wait_step(user)

    user.slurm.start_node(1)
    user.slurm.ask("scancel", "--signal=USR1", job)
    user.wait_log(job, "start 2:")
    user.wait_log(job, "2 ranks")
    facts = user.slurm.wait_state(job, "RUNNING")
    assert (facts["Restarts"], facts["NumNodes"]) == ("1", "2"), "all nodes again"
    wait_until(lambda: (read_json(user.run().plan) or {}).get("ranks") == 2, 60, "2 ranks")
    wait_step(user)
    saved = [start["step"] for start in user.code(user.run())["starts"]]
    assert saved[0] == 0 < saved[1]
    steps = losses(user.run())
    assert sorted(steps) == list(range(1, max(steps) + 1))

    user.slurm.ask("scancel", job)
    user.end(job, "CANCELLED")
    wait_until(lambda: not processes(token), 40, "every process of the job has ended")


def test_a_job_whose_first_node_failed_continues_and_is_requeued(user: User, token: str) -> None:
    job = user.submit("--nodes=2", ranks=1, flags=FLAGS)
    user.wait_log(job, "Iter: 25,")
    user.slurm.fail_node(0)
    wait_ranks(user, 2, 1)  # node 1 has taken over
    os.kill(launcher(token, 1), signal.SIGKILL)  # without a launcher, and without the batch script
    wait_until(
        lambda: user.slurm.facts(job)["Restarts"] == "1", NODE_DOWN_S + 60, "requeue", ASK_EVERY_S
    )
    user.slurm.start_node(0)
    user.wait_log(job, "start 2:")
    wait_step(user)
    assert user.code(user.run())["starts"][1]["step"] >= 20
    user.slurm.ask("scancel", job)
    user.end(job, "CANCELLED")
    wait_until(lambda: not processes(token), 40, "every process of the job has ended")


def test_a_failure_of_the_training_ends_the_job(user: User, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(in_forward(1, 5, "raise ValueError('planted')"))
    job = user.submit("--nodes=2", ranks=1, flags=FLAGS, PYTHONPATH=str(tmp_path / "site"))
    assert user.end(job, "FAILED")["ExitCode"] == "4:0"
    assert (read_json(user.run().failure) or {})["summary"] == "ValueError: planted"
