"""Submission: early refusals, frozen files, next commands."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import CONFIG, CPU, FLAGS, User, losses
from tests.unit import own_task
from training.core.rundir import read_json

pytestmark = pytest.mark.slow


def without_times(text: str) -> list[str]:
    return re.sub(r"(?m)^(\[[A-Z]+\]) \S+ \S+ ", r"\1 ", text).splitlines()


def listing(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_all_mistakes_are_reported_at_once_and_nothing_is_queued(user: User) -> None:
    done = user.call(
        "./submit_job.sh",
        *CPU,
        "--nodes=two",
        "--partitoin=debug",
        "--ntasks=4",
        CONFIG,
        "--device=cpu",
        "--depht=3",
        "--seed=many",
    )
    assert done.returncode == 2 and done.stdout == ""
    logged = without_times(done.stderr)
    for line in (
        "[ERROR] nodes is 'two' (from --nodes)",
        "[ERROR] --partitoin is not a known flag",
        "    try:     ./submit_job.sh --ranks_per_node=2 --nodes=two --partition=debug --ntasks=4",
        "[ERROR] --ntasks is not for submit_job.sh",
        "    allowed: --ranks-per-node=N, or --gres=gpu:N for N GPUs on each node: one task a node "
        "starts the ranks there",
        "[ERROR] --depht is not a known flag",
        "[ERROR] seed is 'many' (from --seed on the command line)",
        "[ERROR] 5 problems; nothing was submitted (exit 2)",
    ):
        assert any(one.startswith(line) for one in logged), done.stderr
    assert any("--depth=3" in one for one in logged)
    assert user.slurm.ask("squeue", "-h") == "" and user.runs == []


def test_the_batch_is_divided_by_the_ranks_of_all_nodes(user: User) -> None:
    done = user.call("./submit_job.sh", "--nodes=2", *CPU, CONFIG, "--device=cpu")
    assert done.returncode == 2
    assert re.search(
        r"max_seq_len 128 \(from configs/dual_gpu/quickstart\.py:\d+\) × 4 ranks = 8192",
        done.stderr,
    )
    fixes = re.findall(r"(?:try|or): +(\./submit_job\.sh .*)", done.stderr)
    assert (
        fixes[0] == f"./submit_job.sh --nodes=2 --ranks_per_node=2 {CONFIG} --device=cpu "
        f"--total_batch_size=8192"
    )
    # The suggested command is accepted.
    assert user.call("bash", "-c", f"{fixes[0]} --dry_run").returncode == 0


def test_dry_run_changes_nothing(user: User) -> None:
    before = listing(user.project)
    done = user.call(
        "./submit_job.sh",
        "--nodes=2",
        "--time=5",
        "--gres=gpu:1",
        CONFIG,
        "--dry_run",
        "--run_name=later",
    )
    assert done.returncode == 0, done.stderr
    code = user.project / "experiments/later/code/submit_job.sh"
    log = user.project / "logs/%x_%j.log"
    command = (
        f"sbatch --parsable --job-name=later '--output={log}' --nodes=2 --time=5 "
        f"--gres=gpu:1 '{code}'"
    )
    assert command in done.stdout and "2 nodes × 1 rank;" in done.stdout
    assert listing(user.project) == before


def test_what_sbatch_refuses_leaves_nothing(user: User) -> None:
    done = user.call("./submit_job.sh", *CPU, "--partition=nowhere", CONFIG, *FLAGS)
    assert done.returncode == 3 and done.stdout == ""
    assert "invalid partition specified: nowhere" in done.stderr
    assert (
        "[ERROR] sbatch refused the job, see its message above; nothing was submitted (exit 3)"
        in without_times(done.stderr)
    )
    assert user.runs == []


def test_a_job_is_found_in_the_queue_when_sbatch_has_not_answered(
    user: User, tmp_path: Path
) -> None:
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    real = shutil.which("sbatch", path=user.slurm.environment["PATH"])
    program.write_text(f'#!/bin/sh\n{real} "$@" >/dev/null\nexit 1\n')
    program.chmod(0o755)
    path = f"{program.parent}:{user.slurm.environment['PATH']}"
    job = user.job(user.call("./submit_job.sh", *CPU, "--hold", CONFIG, *FLAGS, PATH=path))
    assert user.slurm.facts(job)["JobName"] == user.run().name
    assert user.code(user.run())["nodes"] == 1


def test_cpu_needs_a_number_of_ranks(user: User) -> None:
    done = user.call("./submit_job.sh", CONFIG, "--device=cpu")
    assert done.returncode == 2
    assert (
        "device is cpu (from --device on the command line), and the number of ranks on each "
        "node is not set" in done.stderr
    )
    assert f"try:     ./submit_job.sh --ranks_per_node=2 {CONFIG} --device=cpu" in done.stderr


def test_the_answer_has_the_commands_to_monitor_and_cancel(user: User) -> None:
    done = user.call("./submit_job.sh", *CPU, "--hold", CONFIG, *FLAGS, "--run_name=queued")
    job = done.stdout.strip()
    user.jobs.append(job)
    assert done.returncode == 0, done.stderr
    log = user.project / f"logs/queued_{job}.log"
    for text in (
        f"SLURM job {job} submitted: 1 node × 2 ranks",
        str(log),
        "./monitor_training.sh --run=queued",
        f"scancel {job}",
    ):
        assert text in done.stderr
    assert user.slurm.facts(job)["JobName"] == "queued"
    record = user.code(user.run())
    revision = user.call("git", "rev-parse", "HEAD").stdout.strip()
    assert (record["code"]["revision"], record["code"]["changed"]) == (revision, False)
    shown = user.call("./monitor_training.sh", "--run=queued", "--once")
    assert shown.returncode == 0 and "queued" in shown.stdout, "a waiting run can be shown"


def test_later_edits_do_not_affect_the_job(user: User) -> None:
    config = user.project / "configs/dual_gpu/mine.py"
    config.write_text((user.project / CONFIG).read_text() + "seed = 4\n")
    flags = [flag for flag in FLAGS if not flag.startswith("--depth")]
    done = user.call("./submit_job.sh", *CPU, "--hold", str(config), "--depth=1", *flags)
    job = done.stdout.strip()
    user.jobs.append(job)
    run = user.run()
    assert user.code(run)["code"]["changed"] is True, "a new file is a local change"
    # From now on: another seed, and code that would fail in its first line.
    config.write_text("seed = 5\nnonsense\n")
    for name in (
        "train.py",
        "training/trainer/worker.py",
        "training/launcher/slurm/job.py",
        "lib/slurm.sh",
        "submit_job.sh",
        "launch_train.sh",
    ):
        file = user.project / name
        file.write_text(
            "raise SystemExit('edited later')\n"
            if name.endswith(".py")
            else "echo 'edited later'; exit 9\n"
        )
    user.slurm.ask("scontrol", "release", job)
    user.end(job)
    plan = read_json(run.plan) or {}
    assert plan["config"]["seed"] == 4 and plan["config"]["num_iterations"] == 12
    assert "edited later" not in user.log(job) and "training finished" in user.log(job)


@pytest.mark.soak
def test_a_flag_comes_before_a_variable(user: User) -> None:
    user.end(user.submit("--depth=1", DUET_DEPTH="2"))
    plan = read_json(user.run().plan) or {}
    assert plan["config"]["depth"] == 1


def test_later_edits_of_a_task_do_not_affect_the_job(user: User) -> None:
    file, module = user.project / "mine/line.py", user.project / "mine/beside.py"
    file.parent.mkdir()
    file.write_text(own_task.LINE)
    module.write_text("SLOPE = 2.0\n")
    flags = (
        "--device=cpu",
        "--num_iterations=6",
        "--device_batch_size=2",
        "--use_dummy_wandb",
        "--tensorboard=false",
    )
    done = user.call("./submit_job.sh", *CPU, "--hold", "--task=mine/line.py", *flags)
    job = user.job(done)
    assert "later edits do not affect the job" in done.stderr
    for path in (file, module):
        path.write_text("raise SystemExit('edited later')\n")
    user.slurm.ask("scontrol", "release", job)
    user.end(job)
    run = user.run()
    plan = read_json(run.plan) or {}
    frozen = str(run.path / "code/mine/line.py")
    assert plan["task"]["file"] == plan["config"]["task"] == frozen
    assert sorted(losses(run)) == list(range(1, 7)), user.log(job)


def test_the_frozen_code_is_the_project_alone(user: User) -> None:
    (user.project / "training/mine.py").write_text("# not committed yet\n")
    (user.project / "left.bin").write_bytes(b"\0" * (11 << 20))
    (user.project / "train.py").unlink()
    done = user.call("./submit_job.sh", *CPU, "--hold", CONFIG, *FLAGS)
    user.jobs.append(done.stdout.strip())
    code = user.run().path / "code"
    assert (
        (code / "training/mine.py").is_file()
        and (code / "lib/slurm.sh").is_file()
        and not (code / "train.py").exists()
    )
    assert not {".venv", ".git", "left.bin", "experiments", "logs"} & {
        path.name for path in code.iterdir()
    }
    assert "not copied for the job" in done.stderr and "left.bin" in done.stderr
    assert os.access(code / "submit_job.sh", os.X_OK)


def test_an_outer_allocation_does_not_limit_the_job(user: User) -> None:
    done = user.call(
        "./submit_job.sh",
        *CPU,
        "--hold",
        CONFIG,
        *FLAGS,
        SLURM_JOB_ID="1",
        SLURM_STEP_ID="0",
        SLURM_NTASKS="7",
        SLURM_MEM_PER_CPU="1",
    )
    job = done.stdout.strip()
    user.jobs.append(job)
    assert done.returncode == 0, done.stderr
    assert user.slurm.facts(job)["NumTasks"] == "1"


@pytest.mark.soak
def test_the_job_has_the_environment_of_its_submission(user: User, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(user.project / ".venv", other, symlinks=True)
    done = user.call("./submit_job.sh", *CPU, "--hold", CONFIG, *FLAGS, VIRTUAL_ENV=str(other))
    shutil.rmtree(user.project / ".venv")
    job = user.job(done)
    user.slurm.ask("scontrol", "release", job)
    user.end(job)
    assert not (user.project / ".venv").exists() and "creating the environment" not in user.log(job)


@pytest.mark.soak
def test_the_job_has_the_local_build_of_pytorch_of_its_submission(
    user: User, tmp_path: Path
) -> None:
    import torch

    (tmp_path / "built").mkdir()
    (tmp_path / "built/torch").symlink_to(Path(torch.__file__).parent)
    job = user.submit(TORCH_LOCAL_PATH=str(tmp_path / "built"))
    user.end(job)
    variables = (user.run().path / "code.env").read_bytes().split(b"\0")
    assert (
        f"PYTHONPATH={tmp_path}/built".encode() in variables and b"TORCH_LOCAL_PATH=" in variables
    )


@pytest.mark.soak
def test_the_job_has_the_python_of_an_installed_duet(user: User, tmp_path: Path) -> None:
    """That of the system may have no `python`."""
    venv, usr = Path(sys.prefix), tmp_path / "usr"
    (usr / "bin").mkdir(parents=True)
    shutil.copy(venv / "pyvenv.cfg", usr)
    (usr / "lib").symlink_to(venv / "lib")
    python = usr / "bin/python3"
    python.symlink_to(Path(sys.executable).resolve())
    job = user.submit(DUET_PYTHON=str(python))
    user.end(job)
    assert f"PYTHON={python}".encode() in (user.run().path / "code.env").read_bytes().split(b"\0")


def test_a_missing_environment_is_reported(user: User) -> None:
    job = user.submit("--hold")
    shutil.rmtree(user.project / ".venv")
    user.slurm.ask("scontrol", "release", job)
    assert user.end(job, "FAILED")["ExitCode"] == "3:0"
    assert (
        f"the environment of this job is not on node n0: {user.project}/.venv/bin/python (exit 3)"
        in user.log(job)
    )


def test_missing_slurm_is_reported(user: User, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "readlink", "basename", "cksum", "git"):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    done = user.call("./submit_job.sh", *CPU, CONFIG, *FLAGS, PATH=str(bare))
    assert done.returncode == 3 and "sbatch not found" in done.stderr and user.runs == []
