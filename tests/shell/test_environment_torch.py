"""Which torch the environment has: the system's, a local build, or the real one that is
locked."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.shell import wheels
from tests.shell.first_user import User, names


@pytest.mark.slow
def test_a_system_torch_is_used_and_not_downloaded(user: User, tmp_path: Path) -> None:
    """An image with torch: .venv uses it and installs no other."""
    site = tmp_path / "system"
    wheels.unpack(
        site, wheels.fake_torch("2.11.0+vendor") | wheels.metadata_files("torch", "2.11.0+vendor")
    )
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    real = Path(sys.executable).resolve()  # no environment: the Python that has system packages
    python.write_text(f"#!/bin/sh\nPYTHONPATH='{site}' exec '{real}' \"$@\"\n")
    python.chmod(0o755)
    done = user.plan(PATH=f"{python.parent}:{user.env['PATH']}")
    assert f"using torch 2.11 of {real} (system site packages)" in done.err
    assert "include-system-site-packages = true" in (user.venv / "pyvenv.cfg").read_text()
    assert "torch==" not in (user.venv / "requirements.txt").read_text()
    assert not list(user.venv.glob("lib/python3*/site-packages/torch*"))
    assert list(user.venv.glob("lib/python3*/site-packages/wandb"))
    # the same folder outside of the image
    assert user.plan(PATH=f"{python.parent}:{user.env['PATH']}").err == ""
    (site / "torch").rename(site / "elsewhere")
    assert "creating the environment" in user.plan().err
    assert user.installed()["torch"] == wheels.TORCH


@pytest.mark.slow
def test_an_old_system_torch_is_not_used(user: User, tmp_path: Path) -> None:
    site = tmp_path / "system"
    wheels.unpack(site, wheels.fake_torch("2.8.0"))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text(
        f"#!/bin/sh\nPYTHONPATH='{site}' exec '{Path(sys.executable).resolve()}' \"$@\"\n"
    )
    python.chmod(0o755)
    user.plan(PATH=f"{python.parent}:{user.env['PATH']}")
    assert user.installed()["torch"] == wheels.TORCH
    assert "include-system-site-packages = false" in (user.venv / "pyvenv.cfg").read_text()


@pytest.mark.slow
def test_a_local_build_of_torch(user: User, tmp_path: Path) -> None:
    """TORCH_LOCAL_PATH: everything but torch is installed."""
    local = tmp_path / "my build"
    wheels.unpack(local, wheels.fake_torch("2.14.0a0+mine"))
    user.plan(TORCH_LOCAL_PATH=str(local))
    assert names(user) == set(wheels.PACKAGES) - {"torch"}
    code = (
        'source lib/init.sh; python::ensure; "$PYTHON" -c "import torch; '
        'print(torch.__version__, torch.__file__)"'
    )
    done = user.run("bash", "-c", code, TORCH_LOCAL_PATH=str(local))
    assert done.out == f"2.14.0a0+mine {local}/torch/__init__.py\n", done.err


def missing(base: Path, *folders: Path) -> tuple[int, str]:
    """What lib/environment.py reports of an active environment whose packages are in these
    folders."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [base / "bin/python", ROOT / "lib/environment.py", "missing", base]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_an_active_environment_lacks(base: Path, tmp_path: Path) -> None:
    others, torch = tmp_path / "others", tmp_path / "torch"
    assert missing(base)[0] == 1
    assert (
        missing(base)[1]
        == "no torch (2.9 or newer is required), no numpy, no psutil, no nvidia-ml-py, no tqdm\n"
    )
    # With torch, the command that brings the small packages; nothing optional is asked for.
    wheels.unpack(torch, wheels.fake_torch("2.9.0"))
    wheels.unpack(others, {f"{module}/__init__.py": b"" for module in ("numpy", "psutil")})
    code, text = missing(base, others, torch)
    assert code == 3
    assert text.splitlines()[0] == "no nvidia-ml-py, no tqdm"
    assert (
        text.splitlines()[1] == f"    try:     {base}/bin/python -m pip install nvidia-ml-py tqdm"
    )
    wheels.unpack(others, {f"{module}/__init__.py": b"" for module in ("pynvml", "tqdm")})
    # A local build has no package metadata.
    for version, answer in {
        "2.8.0": "torch 2.8 (2.9 or newer is required)\n",
        "2.9.0": "",
        "2.10.0a0+git": "",
        "3.0": "",
    }.items():
        shutil.rmtree(torch, ignore_errors=True)
        wheels.unpack(torch, wheels.fake_torch(version))
        assert missing(base, others, torch) == (int(bool(answer)), answer), version


@pytest.fixture
def on_this_machine(new_user: Callable[[Path], User], base: Path) -> User:
    """A user with this machine's own settings of pip, and the real lock file."""
    return new_user(base)


@pytest.mark.soak  # a clean clone of CI does the same by `make env`
def test_the_real_installation(on_this_machine: User) -> None:
    user = on_this_machine
    first = user.plan()
    log = user.venv / "install.log"
    at = log.stat().st_mtime_ns
    second = user.plan()
    assert second.err == "" and log.stat().st_mtime_ns == at, "nothing is installed again"
    print(f"first run {first.seconds:.1f} s, second {second.seconds:.2f} s")
    lacking = subprocess.run(
        [user.venv / "bin/python", user.folder / "lib/environment.py", "missing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (lacking.returncode, lacking.stdout) == (0, "")
    # The locked versions are compatible.
    pip = [
        user.env["PATH"].partition(":")[0] + "/python3",
        "-m",
        "pip",
        "--python",
        str(user.venv / "bin/python"),
        "check",
    ]
    assert user.run(*pip).code == 0


@pytest.mark.soak
def test_the_real_torch_as_a_local_build(on_this_machine: User, tmp_path: Path) -> None:
    """What torch needs beside itself comes from the lock file."""
    user, local = on_this_machine, tmp_path / "my build"
    local.mkdir()
    site = next((ROOT / ".venv").glob("lib/python3*/site-packages"))
    if not (site / "torch").is_dir():
        pytest.skip("the tested environment has no torch of its own")
    for name in ("torch", "torchgen", "functorch"):  # side by side in a build of PyTorch too
        (local / name).symlink_to(site / name)
    user.plan(TORCH_LOCAL_PATH=str(local))
    code = (
        'source lib/init.sh; python::ensure; "$PYTHON" -c "import torch; torch.ones(1).sum(); '
        'print(torch.__file__)"'
    )
    done = user.run("bash", "-c", code, TORCH_LOCAL_PATH=str(local))
    assert done.out == f"{local}/torch/__init__.py\n", done.err
    assert not list(user.venv.glob("lib/python3*/site-packages/torch"))


def test_a_full_disk_without_an_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A quota may refuse its folder already."""
    monkeypatch.syspath_prepend(str(ROOT / "lib"))
    disk_room = importlib.import_module("disk_room")
    assert "why" in disk_room.full(tmp_path / "none", "why")


def test_a_disk_without_room_for_torch_with_cuda(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Refused before the download if packages come from PyPI; other sources may have a CPU build."""
    monkeypatch.syspath_prepend(str(ROOT / "lib"))
    for name in [n for n in os.environ if n.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    disk_room = importlib.import_module("disk_room")
    venv = tmp_path / "not there yet" / ".venv"

    def problem(gigabytes: float) -> str:
        free = shutil._ntuple_diskusage(10**13, 0, int(gigabytes * 10**9))
        monkeypatch.setattr(shutil, "disk_usage", lambda there: free)
        return str(disk_room.too_small(venv))

    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert problem(7.4) == "" and "about 7.3 GB" in problem(7.2), "pip keeps the wheels meanwhile"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert problem(4.9) == ""
    assert "room for 3.5 GB" in problem(3.5) and "about 4.8 GB" in problem(3.5)
    assert capfd.readouterr().err == ""
    with monkeypatch.context() as smaller:
        smaller.setattr(disk_room, "WITH_CUDA_BYTES", 3_500_100_000)
        venv.mkdir(parents=True)
        (venv / "torch.so").write_bytes(bytes(50_000))
        os.link(venv / "torch.so", tmp_path / "in the cache")
        assert problem(3.5), "what a cache shares is not freed"
        (tmp_path / "in the cache").unlink()
        (venv / "cuda.so").write_bytes(bytes(60_000))
        assert problem(3.5) == "", "the old environment is cleared first"
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/simple")
    assert problem(3.5) == "" and "room for 3.5 GB" in capfd.readouterr().err
