"""tests/install_bats.sh with stubbed npm, apt-get and bats: where the test runner comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

BASIC = ("bash", "env", "dirname", "mkdir", "ln", "cat", "chmod")
# A stubbed installer: creates a bats that prints its version.
INSTALL = (
    'mkdir -p "{0}" && printf "#!/bin/sh\\necho Bats {1}\\n" >"{0}/bats" && chmod +x "{0}/bats"'
)


@dataclass
class Machine:
    """A project folder with nothing in it, and a PATH with the basic tools and stubs only."""

    project: Path
    bin: Path

    def stub(self, name: str, code: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.project}/called"\n{code}\n')
        path.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        command = [str(self.project / "tests/install_bats.sh"), "1.13.0"]
        return subprocess.run(
            command,
            env={"PATH": str(self.bin)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def called(self) -> str:
        path = self.project / "called"
        return path.read_text() if path.exists() else ""

    def version(self) -> str:
        path = self.project / ".tools/bats"
        return subprocess.run(
            [path], env={"PATH": str(self.bin)}, capture_output=True, text=True, check=True
        ).stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "a user's folder", tmp_path / "bin")
    (made.project / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests/install_bats.sh", made.project / "tests")
    made.bin.mkdir()
    for name in BASIC:
        (made.bin / name).symlink_to(shutil.which(name) or name)
    return made


def npm(machine: Machine, code: str = "") -> None:
    machine.stub(
        "npm", code or INSTALL.format(machine.project / ".tools/node_modules/bats/bin", "1.13.0")
    )


def apt(machine: Machine, version: str) -> None:
    machine.stub("apt-get", f'[ "$1" != install ] || {{ {INSTALL.format(machine.bin, version)}; }}')


def test_an_installed_bats_is_used(machine: Machine) -> None:
    machine.stub("bats", "echo Bats 1.5.0")
    npm(machine)
    assert machine.run().returncode == 0
    assert machine.version() == "Bats 1.5.0" and "npm" not in machine.called


@pytest.mark.parametrize("answer", ["echo Bats 1.2.1", "echo Bats 0.4.0", "exit 1"])
def test_npm_where_the_installed_one_is_too_old(machine: Machine, answer: str) -> None:
    machine.stub("bats", answer)
    npm(machine)
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, "")
    assert machine.version() == "Bats 1.13.0"
    assert "npm install --no-save --silent --prefix .tools bats@1.13.0\n" in machine.called


def test_apt_get_where_npm_is_not_there_or_fails(machine: Machine) -> None:
    apt(machine, "1.8.2")
    npm(machine, "exit 1")
    if os.geteuid() != 0:
        assert machine.run().returncode == 3, "apt-get is for root"
        return
    assert machine.run().returncode == 0
    assert machine.version() == "Bats 1.8.2"
    assert "apt-get update" in machine.called and "apt-get install" in machine.called


def test_a_failure_is_reported_with_a_fix(machine: Machine) -> None:
    apt(machine, "1.2.1")  # as in Ubuntu 22.04
    done = machine.run()
    assert done.returncode == 3
    assert "bats >= 1.5 is missing" in done.stderr and "npm install -g bats" in done.stderr
    assert not (machine.project / ".tools/bats").exists()


def test_it_is_fast_when_bats_exists(machine: Machine) -> None:
    npm(machine)
    machine.run()
    before, times = machine.called, []
    for _ in range(5):
        begin = time.monotonic()
        assert machine.run().returncode == 0
        times.append(time.monotonic() - begin)
    assert machine.called == before and min(times) < 0.05


def test_without_a_version_it_prints_its_usage(machine: Machine) -> None:
    done = subprocess.run(
        [machine.project / "tests/install_bats.sh"],
        env={"PATH": str(machine.bin)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "usage: tests/install_bats.sh VERSION" in done.stderr
