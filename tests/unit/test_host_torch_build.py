"""Build of the installed torch, without importing it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.conftest import ROOT, fake_torch, python
from training.host import packages, toolchain, torch_build
from training.host.gpus import Gpu
from training.host.torch_build import TorchBuild


@pytest.mark.parametrize("cuda", ["13.0", "12.8", None])
def test_the_cuda_version_without_importing_torch(cuda: str | None, tmp_path: Path) -> None:
    code = "from training.host import torch_build; print(torch_build.installed())"
    site = fake_torch(tmp_path, cuda)
    done = python("-c", code, PYTHONPATH=f"{site}:{ROOT}")
    assert (done.stdout, done.stderr) == (f"{TorchBuild('2.99.0', cuda, f'{site}/torch')}\n", "")


def test_the_torch_of_this_environment() -> None:
    import torch

    assert torch_build.installed() == TorchBuild(
        torch.__version__, torch.version.cuda, str(Path(torch.__file__).parent)
    )


def test_no_torch_or_no_version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build.importlib.util, "find_spec", lambda name: None)
    assert torch_build.installed() is None
    monkeypatch.undo()
    (fake_torch(tmp_path) / "torch/version.py").unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "torch for 13.0")])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_build.installed() is None


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


def test_what_compiling_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("clang", "clang++"):
        program(tmp_path / name)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_: str(tmp_path))
    here = {"PATH": str(tmp_path)}
    assert toolchain.missing("cuda", here) == {}
    assert toolchain.missing("cuda", here | {"CC": "no-such-cc"}) == {"CC=no-such-cc": "unset CC"}
    assert toolchain.missing("cuda", here | {"CC": "clang -O1"}) == {"CC='clang -O1'": "unset CC"}
    install = f"{toolchain.INSTALL} g++"
    assert toolchain.missing("cpu", here) == {"g++": install}, "torch tries no other one"
    assert toolchain.missing("cpu", here | {"CXX": "icpx"}) == {"CXX=icpx": install}
    assert toolchain.missing("cpu", here | {"CXX": "clang++"}) == {}
    (tmp_path / "Python.h").unlink()
    assert toolchain.missing("cuda", here) == {"Python.h": f"{toolchain.INSTALL} python3-dev"}


def test_a_compiler_that_fails_is_found_before_the_first_step(tmp_path: Path) -> None:
    def lacks(**environ: str) -> dict[str, str]:
        return toolchain.missing("cuda", {"PATH": str(tmp_path)} | environ)

    real, calls = shutil.which("gcc"), tmp_path / "calls"
    # as Debian's without libc6-dev
    program(tmp_path / "gcc", f'echo >> "{calls}"', f'exec {real} -nostdinc "$@"')
    name = "a compiler that works (gcc: stdlib.h: No such file or directory)"
    assert lacks() == lacks() == {name: f"{toolchain.INSTALL} libc6-dev"}
    assert calls.read_text() == "\n", "tried once"
    broken = str(program(tmp_path / "broken", "echo oh no >&2", "exit 1"))
    name = f"a compiler that works ({broken}: oh no)"
    assert lacks(CC=broken) == {name: f"{toolchain.INSTALL} libc6-dev"}, "gcc fails, too"
    assert lacks(CC=broken, PATH=os.environ["PATH"]) == {name: "unset CC"}
    (tmp_path / "foreign").write_bytes(b"\x7fELF for another processor")
    (tmp_path / "foreign").chmod(0o755)
    (name,) = lacks(CC=str(tmp_path / "foreign"))
    assert "Exec format error" in name


def test_python_headers_are_looked_for_where_triton_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Python of Debian outside of an environment: its own scheme is for pip, below /usr/local."""
    program(tmp_path / "clang")
    (tmp_path / "Python.h").write_text("")
    folders = {"posix_prefix": tmp_path, "posix_local": tmp_path / "local"}
    own = SimpleNamespace(
        get_default_scheme=lambda: "posix_local",
        get_path=lambda name, scheme="posix_local": str(folders[scheme]),
    )
    monkeypatch.setattr(toolchain, "sysconfig", own)
    assert toolchain.missing("cuda", {"PATH": str(tmp_path)}) == {}


def test_compiled_code_needs_a_folder_whose_programs_may_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lacks(**environ: str) -> list[str]:
        path = os.environ["PATH"]
        return list(
            toolchain.missing("cpu", {"PATH": path, "TMPDIR": str(tmp_path)} | environ).values()
        )

    assert lacks() == lacks(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "new/folder")) == []
    (tmp_path / "file").touch()
    other = "export TORCHINDUCTOR_CACHE_DIR=~/.cache/torchinductor"
    # those that do not exist are passed over, as in tempfile
    nowhere = {"TMPDIR": str(tmp_path / "file"), "TEMP": str(tmp_path / "gone"), "TMP": ""}
    monkeypatch.setattr(toolchain, "TEMPORARY", (str(tmp_path / "none"), str(tmp_path)))
    assert lacks(**nowhere) == lacks(TMPDIR="", TMP=str(tmp_path)) == []
    monkeypatch.setattr(toolchain, "TEMPORARY", (str(tmp_path / "none"),))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lacks(**nowhere) == [other] and lacks(**nowhere | {"TMP": str(tmp_path)}) == []
    assert lacks(TRITON_CACHE_DIR=str(tmp_path / "file")) == ["unset TRITON_CACHE_DIR"]
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(toolchain.os, "statvfs", lambda folder: flags)
    assert lacks() == [""]  # the home is such a folder, too
    assert lacks(TORCHINDUCTOR_CACHE_DIR="/") == ["unset TORCHINDUCTOR_CACHE_DIR"]


def test_python_3_14_compiles_with_torch_2_10_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(version: str, python: tuple[int, ...], **environ: str) -> list[str]:
        monkeypatch.setattr(toolchain, "sys", SimpleNamespace(version_info=python))
        variables = os.environ | environ
        build = TorchBuild(version, "12.8", "/site/torch")
        found = toolchain.missing("cpu", variables, torch=build)
        return [found[what] for what in found.keys() - toolchain.missing("cpu", variables).keys()]

    (command,) = lacks("2.9.1+cu128", (3, 14, 0))
    assert shlex.split(command) == [*packages.installer(), "torch>=2.10"]
    assert lacks("2.9.1", (3, 15, 0), PYTHONPATH="/site") == [""], "another one would be hidden"
    assert lacks("2.9.1", (3, 13, 9)) == lacks("2.10.0", (3, 14, 0)) == lacks("-", (3, 14)) == []


def test_inductor_needs_a_gpu_of_volta_or_later() -> None:
    old, new = (
        Gpu(0, "GPU-0", name, None, None, None, None, None, capability=capability)
        for name, capability in (("Tesla P40", (6, 1)), ("V100", (7, 0)))
    )
    here = dict(os.environ)
    assert toolchain.missing("cuda", here, [new]) == toolchain.missing("cuda", here)
    assert any("Tesla P40" in what for what in toolchain.missing("cuda", here, [new, old]))
