""".ci/run with stubbed tools: installed tools and exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

OPTIONAL = ("slurmctld", "sshd", "mpirun", "chromium", "prometheus")
TOOLS = ("git", "make", "gcc", "python3", "npm", *OPTIONAL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone on a machine where every tool is a stub that records its calls."""
    folder = tmp_path / "a user's clone"
    (folder / ".ci").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci")
    for name in ("bash", "env", "dirname"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    for name in (*TOOLS, "apt-get"):
        stub(folder, name)
    return folder


def stub(clone: Path, name: str, code: str = "exit 0") -> None:
    path = clone / "bin" / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{clone}/called"\n{code}\n')
    path.chmod(0o755)


def run(clone: Path) -> tuple[int, str, str]:
    """(exit status, output, calls)"""
    (clone / "called").write_text("")
    done = subprocess.run(
        [clone / ".ci/run"],
        env={"PATH": str(clone / "bin")},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, (clone / "called").read_text()


def test_a_machine_that_has_everything(clone: Path) -> None:
    stub(clone, "make", "pwd")
    status, said, called = run(clone)
    assert (status, said) == (0, f"{clone}\n"), "it runs in the project"
    assert called.splitlines()[-1] == "make test" and "apt-get" not in called


@pytest.mark.parametrize("code", [1, 2, 77])
def test_the_exit_status_is_that_of_the_tests(clone: Path, code: int) -> None:
    stub(clone, "make", f"exit {code}")
    assert run(clone)[0] == code


@pytest.mark.skipif(os.geteuid() != 0, reason="apt-get is for root")
@pytest.mark.parametrize(
    ("without", "package"),
    [
        ("gcc", "gcc"),
        ("npm", "bats"),
        ("git", "git"),
        ("python3", "python3 python3-venv"),
        ("slurmctld", "slurm-wlm"),
        ("sshd", "openssh-server openssh-client"),
        ("mpirun", "openmpi-bin"),
        ("chromium", "chromium"),
        ("prometheus", "prometheus"),
    ],
)
def test_what_is_missing_is_installed(clone: Path, without: str, package: str) -> None:
    (clone / "bin" / without).unlink()
    status, said, called = run(clone)
    assert status == 0 and f"missing tools: {package}\n" in said
    assert (
        f"apt-get update -qq\napt-get install -y -qq --no-install-recommends {package}\nmake test\n"
        in called
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="apt-get is for root")
def test_a_python_without_venv(clone: Path) -> None:
    stub(clone, "python3", "exit 1")
    assert "--no-install-recommends python3-venv\n" in run(clone)[2]


def test_it_fails_with_a_message_when_it_cannot_install(clone: Path) -> None:
    (clone / "bin/gcc").unlink()
    (clone / "bin/apt-get").unlink()
    status, said, called = run(clone)
    assert (
        status == 3 and "missing tools: gcc\n" in said and "apt-get and root are required" in said
    )
    assert "make" not in called


@pytest.mark.parametrize("tool", OPTIONAL)
def test_tools_of_skippable_tests_are_optional(clone: Path, tool: str) -> None:
    (clone / "bin" / tool).unlink()
    (clone / "bin/apt-get").unlink()
    status, said, called = run(clone)
    assert (status, said) == (0, "") and called.endswith("make test\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="apt-get is for root")
def test_it_stops_when_the_installation_fails(clone: Path) -> None:
    (clone / "bin/gcc").unlink()
    stub(clone, "apt-get", "exit 100")
    status, _, called = run(clone)
    assert status == 100 and "make" not in called
