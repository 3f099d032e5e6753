"""Jobs on a real SLURM: a separate project for each test, submitted as by a user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOKEN, wait_until
from tests.e2e.conftest import TINY
from tests.slurm.cluster import ASK_EVERY_S, Cluster, missing, running
from training.core.rundir import RunDir, read_json, read_records

CONFIG = "configs/dual_gpu/quickstart.py"
CPU = ("--ranks_per_node=2",)  # instead of GPUs

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def flags(**changes: object) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in (TINY | changes).items())


FLAGS = flags()
LONG_STEPS = 600
LONG = flags(num_iterations=LONG_STEPS, save_every=0)
ENDLESS = flags(num_iterations=1000000)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(f"SLURM is not installed (apt-get install slurm-wlm): no {', '.join(lacking)}")
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def whole(slurm: Cluster, project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The training of LONG without SLURM and without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    command = [
        "./launch_train.sh",
        "2",
        CONFIG,
        *LONG,
        f"--out_dir={folder}",
        f"--log_dir={folder}",
        "--run_name=whole",
    ]
    done = subprocess.run(
        command,
        cwd=project,
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "whole")


@dataclass
class User:
    """A user who submits from the project's folder."""

    slurm: Cluster
    project: Path
    token: str
    jobs: list[str] = field(default_factory=list)

    def call(
        self, *command: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd or self.project,
            env=self.slurm.environment | {TOKEN: self.token, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def submit(self, *args: str, ranks: int = 2, flags: tuple[str, ...] = FLAGS, **env: str) -> str:
        """`./submit_job.sh` for CPU nodes; the ID of the job."""
        return self.job(
            self.call(
                "./submit_job.sh",
                f"--ranks_per_node={ranks}",
                CONFIG,
                *flags,
                *args,
                cwd=None,
                **env,
            )
        )

    def sbatch(
        self,
        *options: str,
        args: tuple[str, ...] = (),
        cwd: Path | None = None,
        script: str = "submit_job.sh",
        **env: str,
    ) -> str:
        return self.job(self.call("sbatch", "--parsable", *options, script, *args, cwd=cwd, **env))

    def job(self, done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 0 and re.fullmatch(r"\d+\n", done.stdout), (
            done.stdout + done.stderr
        )
        self.jobs.append(done.stdout.strip())
        return self.jobs[-1]

    def end(self, job: str, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until a job ends, in this state."""
        facts = self.slurm.wait_state(job, *ENDS, seconds=150)
        assert facts["JobState"] == state, f"{facts}\n{self.log(job)}"
        return facts

    def log(self, job: str) -> str:
        """The log of the job in logs/; '' before it exists."""
        files = list((self.project / "logs").glob(f"*_{job}.log"))
        return files[0].read_text(errors="replace") if files else ""

    def wait_log(self, job: str, text: str) -> None:
        wait_until(
            lambda: text in self.log(job) or self.slurm.facts(job).get("JobState") in ENDS,
            120,
            f"{text!r} in the log",
            ASK_EVERY_S,
        )
        wait_until(lambda: text in self.log(job), 5, f"{text!r} in {self.log(job)[-3000:]}")

    @property
    def runs(self) -> list[RunDir]:
        folder = self.project / "experiments"
        return (
            [RunDir(path) for path in sorted(folder.glob("*")) if not path.name.startswith(".")]
            if folder.exists()
            else []
        )

    def run(self) -> RunDir:
        """The only run."""
        assert len(self.runs) == 1, [run.name for run in self.runs]
        return self.runs[0]

    def code(self, run: RunDir, name: str = "code") -> dict[str, Any]:
        return read_json(run.path / f"{name}.json") or {}


def losses(run: RunDir) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(run.metrics) if "loss" in r}


@pytest.fixture
def user(slurm: Cluster, project: Path, tmp_path: Path, token: str) -> Iterator[User]:
    """A clean clone of the project; prepared texts of other tests are kept."""
    copy = tmp_path / "du et"
    kept = ("experiments", "logs", "data")
    shutil.copytree(
        project,
        copy,
        symlinks=True,
        ignore=lambda folder, names: kept if Path(folder) == project else (),
    )
    (project / "data").mkdir(exist_ok=True)
    (copy / "data").symlink_to(project / "data")
    (copy / "logs").mkdir()
    (copy / "logs/.gitkeep").touch()
    identity = dict.fromkeys(
        ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"), "test"
    )
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "as cloned")):
        subprocess.run(
            ["git", "-C", str(copy), *words],
            check=True,
            env=os.environ | identity,
            capture_output=True,
        )
    user = User(slurm, copy, token)
    yield user
    for job in user.jobs:
        slurm.ask("scancel", job)
    wait_until(lambda: not slurm.ask("squeue", "-h"), 45, "no job is left", ASK_EVERY_S)
