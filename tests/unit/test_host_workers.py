"""Checks at every start of what ranks and workers share: shared memory, cores, open files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, ask, clean_environment
from tests.unit.test_host_preflight import GIB, Usage
from training.host import env_vars
from training.host.placement import LOCAL, NODE, RANK, Topology
from training.plan import preflight
from training.plan.preflight import OK, WARNING, Check, startup_checks


def test_shared_memory_is_checked_with_workers_or_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.shared_memory(0, 2) is None
    assert preflight.shared_memory(0, 1, nccl=True) is None
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, 256 << 20))
    assert preflight.shared_memory(2, 2).status == OK  # type: ignore[union-attr]
    assert preflight.shared_memory(0, 2, nccl=True).status == OK  # type: ignore[union-attr]
    tight = preflight.shared_memory(3, 2)
    assert tight is not None
    assert (tight.status, tight.fixes[0]) == (WARNING, "--num_workers=0")
    assert tight.text.endswith(" free for 6 workers")
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert preflight.shared_memory(3, 2) is None


def test_workers_of_a_validation_are_beside_those_of_the_epoch(line: str) -> None:
    """Those of the epoch keep the batches that they have read ahead."""
    words = ("2", "--device=cpu", "--num_workers=3")
    own = f"--task={line}"
    for more, most in (((), 3), ((own,), 6), ((own, "--eval_every=0"), 3)):
        request = ask(*words, *more, script=LAUNCH)
        facts = preflight.PreflightContext(request, cast(Any, None), None, "cpu")
        assert (facts.workers, facts.most_workers) == (3, most)


def test_a_container_s_shared_memory_is_too_small_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    found = preflight.shared_memory(0, 2, nccl=True)
    assert found is not None
    assert (found.status, found.text) == (WARNING, "64 MiB free for NCCL between 2 ranks")
    assert found.fixes == [
        "docker run --shm-size=8g …   # in a container",
        "sudo mount -o remount,size=8g /dev/shm",
    ]
    both = preflight.shared_memory(4, 2, nccl=True)
    assert both is not None
    assert both.text == "64 MiB free for 8 workers and NCCL between 2 ranks"


ALONE = Topology(LOCAL, "", "")


def have_cores(monkeypatch: pytest.MonkeyPatch, machine: int, own: int) -> None:
    """`own`: cores of this process."""
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(env_vars, "cpu_count", lambda: own)
    monkeypatch.setattr(env_vars, "cores_of_machine", lambda: machine)


@pytest.mark.parametrize(
    ("cores", "workers", "ranks", "status", "text", "fixes"),
    [
        (2, 0, 2, OK, "2 cores for 2 ranks", []),
        (1, 0, 1, OK, "1 core for 1 rank", []),
        (16, 4, 2, OK, "16 cores for 2 ranks and 8 workers", []),
        (2, 0, 8, WARNING, "8 ranks share 2 CPU cores: slow", ["with 2"]),
        (
            4,
            8,
            2,
            WARNING,
            "4 cores for 2 ranks and 16 workers: more workers than cores",
            ["--num_workers=1"],
        ),
    ],
)
def test_cores(
    cores: int,
    workers: int,
    ranks: int,
    status: str,
    text: str,
    fixes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_cores(monkeypatch, cores, cores)
    found = preflight.cpu(workers, ranks, ALONE, {}, lambda ranks: f"with {ranks}")
    assert found == Check("CPU", status, text, fixes)


def test_cores_with_a_cpu_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 64, 2)
    assert preflight.cpu(0, 2, ALONE, {}, str).text == "2 of 64 cores for 2 ranks"


@each(
    ("kind", "ranks", "workers", "own", "machine", "bound"),
    [
        (NODE, 8, 0, 1, 64, "8 ranks to 1 of 64 cores"),
        (NODE, 8, 4, 32, 64, "8 ranks and 32 workers to 32 of 64 cores"),
        (NODE, 8, 4, 64, 64, ""),  # --bind-to none
        (NODE, 8, 4, 32, 32, ""),
        (RANK, 2, 4, 1, 64, "1 rank and 4 workers to 1 of 64 cores"),
        (RANK, 2, 0, 1, 64, ""),
        (RANK, 2, 4, 1, 2, ""),  # its share of the machine
        (RANK, 8, 4, 8, 64, ""),
    ],
)
def test_cores_to_which_mpirun_has_bound_a_process(
    kind: Any,
    ranks: int,
    workers: int,
    own: int,
    machine: int,
    bound: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_cores(monkeypatch, machine, own)
    by = {"mpi": {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "slurm": {}}
    found = {
        source: preflight.cpu(workers, ranks, Topology(kind, source, ""), environ, str)
        for source, environ in by.items()
    }
    assert bound in found["mpi"].text
    fixes = ["mpirun --bind-to none …"]
    assert (found["mpi"].fixes == fixes, found["slurm"].fixes == fixes) == (bool(bound), False)


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(most: int, raisable: int) -> Check:
        monkeypatch.setattr(startup_checks.cgroups, "open_files", lambda: (most, raisable))
        return startup_checks.open_files(4, 2)

    assert limit(1024, 4096) == Check("open files", OK, "1024 per process")
    assert limit(1 << 60, 1 << 60).text == "no limit"
    assert limit(256, 1 << 60) == Check(
        "open files", WARNING, "256 per process, 384 may be needed", ["ulimit -n 4096"]
    )
    assert limit(256, 300).fixes == ["raise nofile in /etc/security/limits.conf, then log in again"]


def test_a_low_limit_of_open_files(tmp_path: Path) -> None:
    command = 'ulimit -n 128; exec "$@"'
    plan = [
        "-m",
        "training.cli.plan",
        "train_dual_gpu_enhanced.sh",
        "--device=cpu",
        "--depth=1",
        "--dry_run",
    ]
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, *plan],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "  warning  open files   128 per process, 256 may be needed\n" in done.stdout
    assert " try: ulimit -n 4096\n" in done.stdout or " try: raise nofile " in done.stdout
    assert "note: open files" not in done.stdout, "it is already in the report"
