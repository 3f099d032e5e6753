"""What submit_job.sh does with the answer of sbatch; sbatch and scontrol are replaced."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.slurm.conftest import CONFIG, CPU, FLAGS
from training.core.rundir import read_json

Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(project: Path, tmp_path: Path) -> Iterator[Submit]:
    """Starts ./submit_job.sh with an sbatch that runs these lines of shell."""
    shutil.rmtree(project / "experiments", ignore_errors=True)
    started = []

    def start(sbatch: str, *args: str, squeue: str = "", **env: str) -> subprocess.Popen[str]:
        scontrol = f"echo \"$@\" >'{tmp_path}/scontrol'"
        for name, text in (("sbatch", sbatch), ("scontrol", scontrol), ("squeue", squeue)):
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_"))}
        started.append(
            subprocess.Popen(
                ["./submit_job.sh", *CPU, CONFIG, *FLAGS, "--run_name=one", *args],
                cwd=project,
                env=clean | env | {"PATH": f"{tmp_path}/bin:{clean['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for one in started:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()
    shutil.rmtree(project / "experiments", ignore_errors=True)


def test_a_failed_job_that_was_awaited_was_submitted(submit: Submit, project: Path) -> None:
    done = submit("echo 7; exit 5", "--sbatch=--wait")
    out, errors = done.communicate()
    assert (out, done.returncode) == ("7\n", 5), errors
    assert "SLURM job 7 submitted" in errors and "refused" not in errors
    assert (project / "experiments/one/code.json").is_file()


def test_frozen_code_whose_path_the_encoding_of_the_output_lacks_is_submitted(
    submit: Submit, tmp_path: Path
) -> None:
    done = submit("echo 7", f"--out_dir={tmp_path}/josé", PYTHONIOENCODING="ascii")
    out, errors = done.communicate()
    assert (out, done.returncode) == ("7\n", 0), errors


def test_an_interrupted_wait_leaves_the_job(submit: Submit, project: Path) -> None:
    done = submit("echo 7; exec sleep 60", "--sbatch=--wait")
    assert done.stderr
    while "scancel 7" not in done.stderr.readline():
        assert done.poll() is None
    os.killpg(done.pid, signal.SIGINT)  # Ctrl-C
    _, errors = done.communicate(timeout=30)
    assert done.returncode in (-signal.SIGINT, 130) and "refused" not in errors
    assert (project / "experiments/one/code.json").is_file()


def test_a_test_submits_nothing(submit: Submit, project: Path) -> None:
    """--test-only, --help, --version."""
    done = submit("echo 'Job 5 to start at 2026' >&2; echo '  --help'", "--sbatch=--test-only")
    out, errors = done.communicate()
    assert (out, done.returncode) == ("", 0)
    assert "Job 5 to start at 2026" in errors and "\n  --help\n" in f"\n{errors}"
    assert "sbatch has submitted no job, see its output above" in errors
    assert "SUCCESS" not in errors and not (project / "experiments/one").exists()


def test_a_refused_job_leaves_nothing(submit: Submit, project: Path) -> None:
    done = submit("echo 'sbatch: error: invalid partition' >&2; exit 1")
    out, errors = done.communicate()
    assert (out, done.returncode) == ("", 3)
    assert "invalid partition" in errors and "sbatch refused the job" in errors
    assert not (project / "experiments/one").exists()


soak = functools.partial(pytest.param, marks=pytest.mark.soak)
TIMED_OUT = "echo 'Socket timed out on send/recv operation' >&2; exit 1"
NO_CLUSTER = "echo 'fatal: Could not establish a configuration source' >&2; exit 1"
# from SLURM 20.02 on: with -h it does not print the cluster
THERE = "case \" $* \" in *' -h '*) ;; *) echo CLUSTER: gpu; echo JOBID STATE COMMAND;; esac; echo 7 PENDING '{script}'"
# which squeue shows only if asked to
SUSPENDED = (
    "case \"$SQUEUE_STATES $*\" in ' '*' -t all '*) echo 7 SUSPENDED '{script}' --frozen=x;; esac"
)
BEGUN = """sed -i 's/"job": null/"job": "7"/' "$(dirname '{script}').json\""""


@pytest.mark.parametrize(
    ("sbatch", "squeue", "env", "status", "number", "kept"),
    [
        (
            TIMED_OUT,
            "echo 6 RUNNING other.sh; echo 7 PENDING '{script}' --frozen=x",
            {},
            0,
            "7\n",
            True,
        ),
        (TIMED_OUT, TIMED_OUT, {}, 3, "", True),
        (NO_CLUSTER, NO_CLUSTER, {}, 3, "", False),
        soak("echo Submitted batch job 7", "echo 7 RUNNING '{script}'", {}, 0, "7\n", True),
        soak(TIMED_OUT, THERE, {"SLURM_CLUSTERS": "gpu"}, 0, "7\n", True),
        # which squeue does not read
        (
            TIMED_OUT,
            f"[ $1 != --clusters=gpu ] || {{ {THERE}; }}",
            {"SBATCH_CLUSTERS": "gpu"},
            0,
            "7\n",
            True,
        ),
        (TIMED_OUT, SUSPENDED, {"SQUEUE_STATES": "R"}, 0, "7\n", True),
        soak(TIMED_OUT, "echo 6 RUNNING other.sh", {}, 3, "", False),
        # of earlier runs with this name
        soak(TIMED_OUT, "echo 5 CANCELLED '{script}'", {}, 3, "", False),
        soak(TIMED_OUT, "echo 6 COMPLETING '{script}'", {}, 3, "", False),
        # it has ended by now, and squeue has forgotten it
        soak(TIMED_OUT, BEGUN, {}, 0, "7\n", True),
    ],
)
def test_a_job_that_was_accepted_without_an_answer_keeps_its_run(
    submit: Submit,
    project: Path,
    sbatch: str,
    squeue: str,
    env: dict[str, str],
    status: int,
    number: str,
    kept: bool,
) -> None:
    script = str(project / "experiments/one/code/submit_job.sh").replace("'", "'\\''")
    done = submit(sbatch, squeue=squeue.replace("{script}", script), **env)
    out, errors = done.communicate()
    assert (done.returncode, out) == (status, number), errors
    assert (project / "experiments/one/code.json").is_file() == kept
    assert ("scancel -M gpu 7" in errors) == any("CLUSTERS" in name for name in env)
    assert ("refused" in errors) != kept


def test_a_job_on_another_cluster(submit: Submit, tmp_path: Path) -> None:
    """The variables that choose it and log in there are kept; those of a job are not."""
    kept = {"SLURM_CLUSTERS": "gpu", "SLURM_JWT": "secret", "SLURM_CONF": "/etc/slurm.conf"}
    variables = tmp_path / "variables"
    sbatch = f"env | grep '^SLURM_' >'{variables}'; echo 'loading modules'; echo '7;gpu'"
    done = submit(sbatch, **kept, SLURM_NTASKS="7")
    out, errors = done.communicate()
    assert (out, done.returncode) == ("7\n", 0), errors
    assert set(variables.read_text().splitlines()) == {f"{n}={v}" for n, v in kept.items()}
    assert (tmp_path / "scontrol").read_text() == "-M gpu show job 7\n"
    assert "squeue -M gpu -j 7;" in errors and "scancel -M gpu 7\n" in errors
    assert "loading modules" in errors, "of a profile"


@pytest.mark.parametrize("deleted", [False, True])
def test_a_job_needs_no_answer_of_scontrol_to_run_its_frozen_code(
    submit: Submit, project: Path, tmp_path: Path, deleted: bool
) -> None:
    """Otherwise it would train the defaults with the live project, which is beside it."""
    assert submit("echo 7").wait() == 0
    frozen = project / "experiments/one/code"
    words = frozen.with_name("code.argv").read_text().split("\0")[:-1]
    script, *args = words[words.index(f"{frozen}/submit_job.sh") :]
    spool = tmp_path / "slurm_script"  # SLURM runs a copy
    shutil.copy(script, spool)
    for name, status in (("scontrol", 1), ("srun", 0)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if deleted:
        shutil.rmtree(frozen)
    done = subprocess.run(
        ["bash", str(spool), *args],
        cwd=project,
        env=os.environ
        | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
        | {"SLURM_SUBMIT_DIR": str(project), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if deleted else 0), done.stderr
    assert [run.name for run in (project / "experiments").iterdir()] == ["one"]
    starts = (read_json(frozen.with_name("code.json")) or {})["starts"]
    assert len(starts) == (0 if deleted else 1)
