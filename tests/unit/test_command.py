"""`python -m training.X`: help, missing packages and closed pipes (training/host/program.py)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.conftest import python

# Every program of the package; -S simulates an empty installation.
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "training").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def bare(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-I", str(ROOT / "lib/run_module.py"), *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        timeout=120,
    )


def test_there_are_programs() -> None:
    assert {
        "training.cli.submit",
        "training.cli.supervise",
        "training.cli.plan",
        "training.cli.check_request",
        "training.cli.scaling",
    } <= set(PROGRAMS)


@each("program", PROGRAMS)
def test_every_program_has_help(program: str) -> None:
    done = bare(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.parametrize("words", [("training.cli.scaling",), ("training.cli.communication", "2")])
def test_missing_packages(words: tuple[str, ...]) -> None:
    done = bare(*words)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert f"{sys.executable} lacks torch" in done.stderr and " install torch" in done.stderr


@each(
    ("words", "shown"),
    [
        (("nowhere.py", "--lang=zh"), "配置文件 nowhere.py 不存在"),
        (("--lang", "zh", "nowhere.py"), "配置文件 nowhere.py 不存在"),
        (("--lang=en", "nowhere.py"), "nowhere.py does not exist"),
        (("--lang=fr", "nowhere.py"), "--lang is 'fr'"),
        (("nowhere.py", "--lang"), "--lang is ''"),
    ],
)
def test_train_py_takes_the_language(words: tuple[str, ...], shown: str) -> None:
    done = python("train.py", *words, cwd=ROOT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert shown in done.stderr.splitlines()[0]


def test_train_py_without_packages() -> None:
    command = [sys.executable, "-S", "train.py", "configs/dual_gpu/quickstart.py", "--device=cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "lacks torch, numpy, psutil, nvidia-ml-py, tqdm" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        (
            "lib/run_module.py",
            "training.cli.plan",
            "train_dual_gpu.sh",
            "configs/dual_gpu/quickstart.py",
            "--device=cpu",
            "--dry_run",
        ),
        ("train.py", "configs/dual_gpu/quickstart.py", "--device=cpu", "--dry_run"),
        (
            "lib/run_module.py",
            "training.cli.submit",
            "check",
            "--ranks_per_node=2",
            "--device=cpu",
            "--dry_run",
        ),
        ("lib/run_module.py", "training.cli.scaling.__main__", "--help"),
    ],
)
def test_a_closed_pipe(words: tuple[str, ...], tmp_path: Path) -> None:
    code = f"{shlex.join([sys.executable, *words])} 2>{tmp_path / 'err'} | true"
    subprocess.run(
        ["bash", "-c", f"set -o pipefail; sleep 0; {code}"], cwd=ROOT, check=False, timeout=120
    )
    assert (tmp_path / "err").read_text() == ""


def test_an_unknown_slurm_command() -> None:
    done = bare("training.cli.submit", "sumbit")
    assert (
        done.returncode == 2
        and "'sumbit' is not a command" in done.stderr
        and "Traceback" not in done.stderr
    )
