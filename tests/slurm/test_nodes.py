"""Two nodes, and starts of ranks by srun without submit_job.sh."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.hooks import in_forward
from tests.slurm.cluster import ASK_EVERY_S
from tests.slurm.conftest import CONFIG, FLAGS, LONG, User, flags, losses
from training.core.rundir import RunDir, read_json
from training.launcher.slurm.job import LAST_NODE_S

pytestmark = pytest.mark.slow
TWO = "--nodes=2"
ENDLESS = flags(device_batch_size=2, num_iterations=1000000)


def test_two_nodes_train_one_run(user: User) -> None:
    job = user.submit(TWO, flags=flags(device_batch_size=2))
    assert user.end(job)["NumNodes"] == "2"
    run, log = user.run(), user.log(job)
    plan = read_json(run.plan) or {}
    assert (
        plan["ranks"],
        plan["local_ranks"],
        plan["place"]["nnodes"],
        plan["place"]["source"],
    ) == (4, 2, 2, "slurm")
    assert (
        f"SLURM job {job}: 2 ranks on each of 2 nodes (n[0-1])" in log
        and "a SLURM task for each of 2 nodes" in log
    )
    assert (
        log.count("] training finished") == 0 and len(re.findall(r"\d training finished", log)) == 1
    ), "one node reports the end of the run"
    assert sorted(losses(run)) == list(range(1, 13))


@pytest.mark.soak
def test_two_nodes_resume_exactly_after_the_signal(user: User, whole: RunDir) -> None:
    job = user.submit(TWO, ranks=1, flags=LONG)
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scancel", "--signal=USR1", job)
    assert user.end(job)["Restarts"] == "1"
    assert losses(user.run()) == losses(whole), "also with the two ranks on two nodes"


@pytest.mark.soak
def test_two_nodes_plain_sbatch_and_requeue(user: User, whole: RunDir) -> None:
    job = user.sbatch(TWO, "--gres=none", args=("--ranks_per_node=1", CONFIG, *LONG))
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scontrol", "requeue", job)
    assert user.end(job)["Restarts"] == "1"
    assert losses(user.run()) == losses(whole)


@pytest.mark.soak
def test_a_failure_on_one_node_ends_the_job_with_its_cause(user: User, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(in_forward(3, 5, "raise ValueError('planted')"))
    job = user.submit(TWO, flags=ENDLESS, PYTHONPATH=str(tmp_path / "site"))
    facts = user.end(job, "FAILED")
    failure = read_json(user.run().failure) or {}
    assert (failure["rank"], failure["summary"], failure["exit_code"]) == (
        3,
        "ValueError: planted",
        4,
    )
    assert facts["ExitCode"] == "4:0" and facts["Restarts"] == "0", (
        "srun alone would report the status of the last victim"
    )
    assert f"SLURM job {job} is not requeued: a rank failed" in user.log(job)


@pytest.mark.soak
def test_a_killed_launcher_on_one_node_ends_the_other(user: User, token: str) -> None:
    job = user.submit(TWO, flags=ENDLESS)
    user.wait_log(job, "Iter: 5,")
    (second,) = [
        pid
        for pid, command in processes(token).items()
        if "training.cli.supervise" in command and "--node=1" in command
    ]
    os.kill(second, signal.SIGKILL)
    user.end(job, "FAILED")
    wait_until(lambda: not processes(token), 20, "every process of the job has ended")
    assert "is not requeued" in user.log(job)


@pytest.mark.soak
def test_a_silent_node_requeues_the_job(user: User, token: str) -> None:
    job = user.submit(TWO, ranks=1, flags=flags(num_iterations=1000000, save_every=20))
    user.wait_log(job, "Iter: 25,")
    user.slurm.freeze_node(1)
    wait_until(lambda: "start 2:" in user.log(job), 2 * LAST_NODE_S, "a requeue", ASK_EVERY_S)
    failure = read_json(user.run().failure) or {}
    assert (failure["kind"], failure["node"], failure["exit_code"]) == ("silent", 1, 4)
    user.wait_log(job, "Iter: 45,")
    assert user.slurm.facts(job)["Restarts"] == "1"
    assert user.code(user.run())["starts"][1]["step"] >= 20
    user.slurm.ask("scancel", job)
    user.end(job, "CANCELLED")
    wait_until(lambda: not processes(token), 40, "every process of the job has ended")


@pytest.mark.soak
def test_scancel_leaves_nothing_on_either_node(user: User, token: str) -> None:
    job = user.submit(TWO, flags=ENDLESS)
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scancel", job)
    user.end(job, "CANCELLED")
    wait_until(lambda: not processes(token), 40, "every process of the job has ended")
    assert "checkpoint saved" in user.log(job) and user.slurm.facts(job)["Restarts"] == "0"


@pytest.mark.parametrize(
    ("tasks", "command"),
    [
        pytest.param(
            ("--ntasks=2",), (".venv/bin/python", "-u", "train.py"), marks=pytest.mark.soak
        ),
        pytest.param(
            ("--nodes=1", "--ntasks-per-node=2"), ("./launch_train.sh", "2"), marks=pytest.mark.soak
        ),
        (("--nodes=2", "--ntasks-per-node=1"), ("./launch_train.sh", "1")),
        pytest.param(
            ("--ntasks=2", "--gpus-per-task=1"),
            (".venv/bin/python", "-u", "train.py"),
            marks=pytest.mark.soak,
        ),
    ],
    ids=[
        "train.py",
        "launcher in a task for each rank",
        "launcher in a task for each node",
        "a GPU for each task",
    ],
)
def test_srun_without_submit_job(
    user: User, tasks: tuple[str, ...], command: tuple[str, ...]
) -> None:
    done = user.call("srun", "--kill-on-bad-exit=1", *tasks, *command, CONFIG, *FLAGS)
    logged = done.stdout + done.stderr
    assert done.returncode == 0, logged
    run = user.run()
    plan = read_json(run.plan) or {}
    assert plan["ranks"] == 2 and sorted(losses(run)) == list(range(1, 13)), logged
    assert "SLURM_STEP_ID" in logged, "the variable it uses is reported"


@pytest.mark.soak
def test_srun_reports_a_mistake_once(user: User) -> None:
    done = user.call(
        "srun", "--ntasks=2", ".venv/bin/python", "-u", "train.py", CONFIG, *FLAGS, "--depht=3"
    )
    assert done.returncode == 2 and done.stderr.count("--depht is not a known flag") == 1, (
        done.stderr
    )
    assert user.runs == []


@pytest.mark.soak
def test_the_example_runs_a_script_on_two_nodes(user: User, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size())\n"
        "dist.barrier()  # rank 0 has the store\n"
        "dist.destroy_process_group()\n"
    )
    job = user.sbatch(
        *("--gpus-per-node=2", "--cpus-per-task=1", "--time=5", "--output=out.log"),
        args=("main.py",),
        cwd=tmp_path,
        script=str(user.project / "examples/clusters/slurm.sh"),
        DUET=str(user.project / "duet"),
    )
    user.end(job)
    assert "rank 0 of 4\n" in (tmp_path / "out.log").read_text()
