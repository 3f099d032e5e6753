"""GPUs that one launch has chosen are left alone by the next."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT, SIMPLE, python
from tests.unit.nvidia_machine import QUICKSTART, UUID, Nvidia, dry_run
from tests.unit.test_host_gpu_choice import gpu
from training.host import gpu_claims
from training.host.gpus import Gpu


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of another launch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def known(index: int) -> Gpu:
    return replace(gpu(index, 79), uuid=UUID.format(index))


def test_a_claim_ends_with_its_process(launch: subprocess.Popen[bytes]) -> None:
    gpu_claims.claim(launch.pid, [known(0), known(2)])
    assert gpu_claims.others() == {UUID.format(0): launch.pid, UUID.format(2): launch.pid}
    gpu_claims.release(launch.pid)
    assert gpu_claims.others() == {}
    gpu_claims.claim(launch.pid, [known(1)])
    launch.kill()
    launch.wait()
    assert gpu_claims.others() == {}
    assert not list(gpu_claims._folder().iterdir())


def test_launches_of_all_sessions_see_each_other(
    launch: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cron and `sudo -u` have no runtime folder, that after `su` is another user's, and a logout
    removes it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    gpu_claims.claim(launch.pid, [known(0)])
    for runtime in (tmp_path / "run", tmp_path / "removed"):
        (tmp_path / "run").mkdir(exist_ok=True)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert gpu_claims.others() == {UUID.format(0): launch.pid}
    assert not [*(tmp_path / "run").iterdir()]


def test_machines_may_share_the_folder(
    launch: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.uname()
    gpu_claims.claim(launch.pid, [known(0)])
    there = os.uname_result((here.sysname, "another", *here[2:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "uname", lambda: there)
        gpu_claims.claim(launch.pid, [known(1)])  # of the same PID
        assert gpu_claims.others() == {UUID.format(1): launch.pid}
        gpu_claims.release(launch.pid)
    assert gpu_claims.others() == {UUID.format(0): launch.pid}


def test_old_claims_are_not_cleaned_up(launch: subprocess.Popen[bytes]) -> None:
    """By systemd-tmpfiles(8), during long trainings."""
    gpu_claims.claim(launch.pid, [known(0)])
    (file,) = gpu_claims._folder().glob("*.json")
    assert file.stat().st_mode & stat.S_ISVTX


def test_the_own_claim_is_none_of_another(launch: subprocess.Popen[bytes]) -> None:
    gpu_claims.claim(os.getpid(), [known(0)])
    assert gpu_claims.others() == {}


def test_a_folder_of_someone_else_is_not_used(
    launch: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / f"duet-gpus-{os.getuid()}").write_text("")
    gpu_claims.claim(launch.pid, [known(0)])
    with gpu_claims.choosing():
        assert gpu_claims.others() == {}


def test_the_next_launch_takes_other_gpus(launch: subprocess.Popen[bytes], nvidia: Nvidia) -> None:
    gpu_claims.claim(launch.pid, [known(0), known(1)])
    here = {"TMPDIR": tempfile.gettempdir()}
    found = dry_run(nvidia(COUNT=4) | here, QUICKSTART).stdout
    assert "CUDA_VISIBLE_DEVICES=2,3 " in found and f"(pid {launch.pid})" in found
    # Of two GPUs both are needed: a warning that names the launch.
    found = dry_run(nvidia(COUNT=2) | here, QUICKSTART).stdout
    assert "CUDA_VISIBLE_DEVICES=" not in found
    assert found.count(f"pid {launch.pid} (") == 2


def test_only_a_start_claims(nvidia: Nvidia, tmp_path: Path) -> None:
    variables = nvidia(COUNT=2) | {"TMPDIR": str(tmp_path)}
    folder = tmp_path / f"duet-gpus-{os.getuid()}"
    assert not dry_run(variables, QUICKSTART).returncode and not list(folder.glob("*.json"))
    words = (SIMPLE, QUICKSTART, f"--out_dir={tmp_path}", f"--log_dir={tmp_path}")
    done = python(
        "-m", "training.cli.plan", *words, "--communication_test=0", cwd=ROOT, **variables
    )
    assert done.returncode == 0, done.stderr
    assert [file.name for file in folder.glob("*.json")] == [gpu_claims._name(os.getpid())]
