"""A job on one node: to its end, through the time limit, preemption and cancellation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.hooks import in_forward
from tests.slurm.conftest import CONFIG, ENDLESS, FLAGS, LONG, LONG_STEPS, User, losses
from training.core.heartbeat import read
from training.core.rundir import RunDir, read_json, read_records

pytestmark = pytest.mark.slow


def test_a_job_trains_to_its_end(user: User) -> None:
    job = user.submit()
    facts = user.end(job)
    assert facts["ExitCode"] == "0:0"
    run, log = user.run(), user.log(job)
    assert facts["StdOut"] == f"{user.project}/logs/{run.name}_{job}.log".split(" ")[0], (
        "SLURM writes to the project's logs"
    )
    assert f"SLURM job {job}: 2 ranks on 1 node (n" in log and "training finished" in log
    assert sorted(losses(run)) == list(range(1, 13))
    assert (read_json(run.plan) or {})["ranks"] == 2


def test_plain_sbatch_from_the_project(user: User) -> None:
    own = ("--gres=none", "--cpus-per-task=3", "--time=30")
    job = user.sbatch(*own, args=("--ranks_per_node=2", CONFIG, *FLAGS))
    user.end(job)
    assert (user.project / f"logs/duet_{job}.log").is_file(), "as in the header"
    again = ["--nodes=1", "--gres=none", "--partition=debug", "--cpus-per-task=3"]
    again += ["--time=00:30:00", "--ranks_per_node=2"]
    assert user.code(user.run())["typed"] == again, "in a command to continue"
    assert "training finished" in user.log(job) and sorted(losses(user.run())) == list(range(1, 13))
    assert (user.run().path / "code/submit_job.sh").is_file()


@pytest.mark.soak
def test_plain_sbatch_from_another_folder_finds_the_project(user: User, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/logs").mkdir(parents=True)
    script = str(user.project / "submit_job.sh")
    config = str(user.project / CONFIG)
    job = user.sbatch(
        "--gres=none",
        script=script,
        args=("--ranks_per_node=2", config, *FLAGS),
        cwd=tmp_path / "elsewhere",
    )
    user.end(job)
    assert "training finished" in (tmp_path / f"elsewhere/logs/duet_{job}.log").read_text()
    assert sorted(losses(user.run())) == list(range(1, 13)), "the run is in the project"


@pytest.mark.soak
def test_a_copy_of_the_script_elsewhere_finds_the_project_where_it_was_submitted(
    user: User, tmp_path: Path
) -> None:
    copy = tmp_path / "my job.sh"
    copy.write_text((user.project / "submit_job.sh").read_text())
    job = user.sbatch("--gres=none", script=str(copy), args=("--ranks_per_node=2", CONFIG, *FLAGS))
    user.end(job)
    assert "training finished" in user.log(job)


def test_a_missing_project_is_reported(user: User, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "job.sh").write_text((user.project / "submit_job.sh").read_text())
    job = user.sbatch("--gres=none", "--output=out.txt", script="job.sh", args=(CONFIG,), cwd=copy)
    assert user.end(job, "FAILED")["ExitCode"] == "2:0"
    assert (
        f"the code of the job is not at {copy}/job.sh or {copy}: " in (copy / "out.txt").read_text()
    )


def test_plain_sbatch_reports_what_is_missing(user: User) -> None:
    job = user.sbatch("--gres=none", args=(CONFIG, "--device=cpu"))
    assert user.end(job, "FAILED")["ExitCode"] == "2:0"
    assert (
        "this job has no GPUs (SLURM_GPUS_ON_NODE is not set), and the number of ranks on "
        "each node is not set" in user.log(job)
    )
    late = user.sbatch(
        "--gres=none", args=("--ranks_per_node=2", "--nodes=2", CONFIG, "--device=cpu")
    )
    user.end(late, "FAILED")
    assert "--nodes=2 is after submit_job.sh: the job has started without it" in user.log(late)
    assert user.runs == []


@pytest.mark.soak
@pytest.mark.parametrize("more", [[], ["--exclusive"]], ids=["shared", "exclusive"])
def test_the_number_of_gpus_is_the_number_of_ranks(user: User, more: list[str]) -> None:
    """With --exclusive all GPUs of the node are allocated, but a step has the requested ones."""
    job = user.sbatch("--gres=gpu:1", *more, args=(CONFIG, *FLAGS))
    user.end(job)
    assert (read_json(user.run().plan) or {})["ranks"] == 1


@pytest.mark.parametrize(
    "plain", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["submit_job.sh", "sbatch"]
)
def test_the_signal_before_the_time_limit_saves_requeues_and_resumes_exactly(
    user: User, whole: RunDir, plain: bool
) -> None:
    job = (
        user.sbatch("--gres=none", args=("--ranks_per_node=2", CONFIG, *LONG))
        if plain
        else user.submit(flags=LONG)
    )
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scancel", "--signal=USR1", job)
    facts = user.end(job)
    assert facts["Restarts"] == "1"
    run, log = user.run(), user.log(job)
    assert log.count("USR1: finishing the current step") == 1, "the supervisor gets it once"
    assert "is requeued and resumes at step" in log and f"SLURM job {job}, start 2:" in log
    assert losses(run) == losses(whole), "bit for bit"
    starts = user.code(run)["starts"]
    assert [s["start"] for s in starts] == [1, 2] and starts[0]["step"] == 0 < starts[1][
        "step"
    ] < LONG_STEPS
    assert len([r for r in read_records(run.metrics) if "loss" in r]) == LONG_STEPS, "no step twice"


def test_a_signal_for_the_batch_script_alone_is_passed_on(user: User) -> None:
    """As from `sbatch --signal=B:USR1@120`."""
    job = user.sbatch("--gres=none", args=("--ranks_per_node=2", CONFIG, *LONG))
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scancel", "--batch", "--signal=USR1", job)
    assert user.end(job)["Restarts"] == "1"
    log = user.log(job)
    assert log.count("USR1: finishing the current step") == 1
    assert "is requeued and resumes at step" in log and f"SLURM job {job}, start 2:" in log


@pytest.mark.soak
def test_an_array_is_refused(user: User) -> None:
    job = user.sbatch("--gres=none", "--array=0-1", args=("--ranks_per_node=2", CONFIG, *FLAGS))
    refused = f"job {job} is an array (--array)"
    logs = user.project / "logs"
    wait_until(
        lambda: [refused in file.read_text() for file in logs.glob("duet_*.log")] == [True, True],
        60,
        "both tasks are refused",
    )
    assert user.runs == []


@pytest.mark.soak
def test_the_time_limit_itself(user: User) -> None:
    """SLURM sends the signal itself; it checks about once a minute, hence the long wait."""
    job = user.submit("--time=2", "--signal=USR1@110", flags=ENDLESS)
    user.wait_log(job, "USR1: finishing the current step")
    user.wait_log(job, "start 2:")
    assert "DUE TO TIME LIMIT" not in user.log(job)


@pytest.mark.soak
@pytest.mark.parametrize("preempted", [True, False], ids=["preemption", "scontrol requeue"])
def test_preemption_requeues_and_resumes_exactly(
    user: User, whole: RunDir, preempted: bool
) -> None:
    """SLURM itself restarts the job. At a preemption it sends TERM twice at once."""
    job = user.submit(flags=LONG)
    user.wait_log(job, "Iter: 5,")
    if preempted:
        node = user.slurm.facts(job)["NodeList"]
        urgent = ("--partition=urgent", f"--nodelist={node}", "--output=/dev/null", "--wrap=true")
        user.job(user.call("sbatch", "--parsable", *urgent))
    else:
        user.slurm.ask("scontrol", "requeue", job)
    facts = user.end(job)
    log = user.log(job)
    assert facts["Restarts"] == "1" and log.count("TERM: finishing the current step") == 1
    assert "(again: stop now)" not in log and "checkpoint saved" in log.partition("start 2:")[0]
    assert "is requeued and resumes" not in log, "SLURM requeues it itself"
    assert losses(user.run()) == losses(whole)


def test_scancel_ends_it_for_good(user: User, token: str) -> None:
    job = user.submit(flags=ENDLESS)
    user.wait_log(job, "Iter: 5,")
    assert len(processes(token)) >= 4, "batch script, supervisor, ranks"
    user.slurm.ask("scancel", job)
    user.end(job, "CANCELLED")
    wait_until(lambda: not processes(token), 40, "every process of the job has ended")
    assert user.slurm.ask("squeue", "-h") == ""
    assert user.slurm.facts(job)["Restarts"] == "0"
    assert "only after preemption" in user.log(job) and "checkpoint saved" in user.log(job)


def test_a_failure_is_not_requeued_and_the_job_has_the_exit_code_of_the_run(
    user: User, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(in_forward(1, 5, "raise ValueError('planted')"))
    job = user.submit(PYTHONPATH=str(tmp_path / "site"))
    facts = user.end(job, "FAILED")
    assert facts["ExitCode"] == "4:0" and facts["Restarts"] == "0"
    assert (read_json(user.run().failure) or {})["rank"] == 1
    assert (read_json(user.run().plan) or {})["submission"] == "code"
    assert "./launch_train.sh" not in user.log(job)
    assert f"SLURM job {job} is not requeued: a rank failed" in user.log(job)
    assert (
        f"resume: ./submit_job.sh --gres=none --ranks_per_node=2 --resume={user.run().name}"
        in user.log(job)
    )


@pytest.mark.soak
def test_the_resume_command_of_a_job_that_may_not_be_requeued_works(
    user: User, whole: RunDir
) -> None:
    job = user.submit("--no-requeue", "--run_name=cut", flags=LONG)
    user.wait_log(job, "Iter: 5,")
    user.slurm.ask("scancel", "--signal=USR1", job)
    assert user.end(job, "FAILED")["ExitCode"] == "75:0"
    assert f"job {job} cannot be requeued: it was submitted with --no-requeue" in user.log(job)
    advice = user.log(job).partition("resume: ")[2].splitlines()[0]
    again = user.job(user.call("bash", "-c", advice))
    user.end(again)
    assert losses(user.run()) == losses(whole)
    assert (user.run().path / "code_2/submit_job.sh").is_file(), (
        "a later submission has its own code"
    )


@pytest.mark.soak
def test_a_job_without_progress_is_not_requeued_for_ever(user: User) -> None:
    """A time limit shorter than the start."""
    job = user.submit()
    for count in (1, 2):
        wait_until(
            lambda count=count: user.runs and len(user.code(user.run())["starts"]) == count,
            60,
            f"start {count}",
        )
        run, since = user.run(), user.code(user.run())["starts"][-1]["time"]
        wait_until(
            lambda run=run, since=since: (
                (beat := read(run.heartbeat(1))) and beat.wall_time > since
            ),
            60,
            "rank 1",
        )
        user.slurm.ask("scancel", "--signal=USR1", job)
    assert user.end(job, "FAILED")["Restarts"] == "1"
    assert f"job {job} is not requeued: two starts did not get past step 0" in user.log(job)
