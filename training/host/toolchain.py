"""What torch.compile needs on this machine: it builds C code on a GPU too (Triton's launchers).
Triton and Inductor take the value of CC or CXX as one program, without arguments."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from training.core.messages import msg
from training.host import packages, torch_build
from training.host.gpus import Gpu
from training.host.torch_build import TorchBuild

INSTALL = "sudo apt-get install"
# device → variable that names the compiler, otherwise these, and the Debian package
_COMPILERS = {"cuda": ("CC", ("gcc", "clang"), "gcc"), "cpu": ("CXX", ("g++",), "g++")}
TRITON_CAPABILITY = (7, 0)  # the oldest that Inductor accepts (torch/_inductor/scheduler.py)
# a Python for which an older torch refuses to compile (torch.compile in torch/__init__.py)
NEW_PYTHON, TORCH_FOR_IT = (3, 14), (2, 10)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # of tempfile, after those of the environment


def missing(
    device: str,
    environ: Mapping[str, str],
    gpus: Iterable[Gpu] = (),
    torch: TorchBuild | None = None,
) -> dict[str, str]:
    """What is missing on this machine → a command that provides it, '' for none. `gpus`: those of
    the ranks; `torch`: the installed one."""
    variable, usual, package = _COMPILERS[device]
    asked = environ.get(variable)

    def known(*programs: str) -> bool:
        return any(shutil.which(program, path=environ.get("PATH")) for program in programs)

    lacks = dict(filter(None, (_newer_torch(torch, environ),)))
    if asked and not known(asked):
        named = f"{variable}={shlex.quote(asked)}"
        lacks[named] = f"unset {variable}" if known(*usual) else f"{INSTALL} {package}"
    elif not asked and not known(*usual):
        lacks[package] = f"{INSTALL} {package}"
    if not Path(_python_headers(), "Python.h").is_file():
        lacks["Python.h"] = f"{INSTALL} python3-dev"
    for gpu in gpus:
        if gpu.capability and tuple(gpu.capability) < TRITON_CAPABILITY:
            lacks[msg("host.toolchain.too_old", name=gpu.name)] = ""
    return lacks | dict(filter(None, (_cache(name, environ) for name in CACHES)))


def _python_headers() -> str:
    """Where Triton looks for Python.h (triton/runtime/build.py): Debian's own scheme names a folder
    below /usr/local."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


def _newer_torch(torch: TorchBuild | None, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A torch that compiles under this Python, and a command unless a variable selects the
    torch."""
    if torch is None or torch.number is None or sys.version_info < NEW_PYTHON:
        return None
    if torch.number >= TORCH_FOR_IT:
        return None
    first, python = (".".join(map(str, one)) for one in (TORCH_FOR_IT, NEW_PYTHON))
    text = msg("host.toolchain.torch", first=first, python=python, version=torch.version)
    chosen = torch_build.chosen_by(torch, environ)
    return text, "" if chosen else packages.install([f"torch>={first}"])


def _cache(variable: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A folder for compiled code that cannot be used, and a command. Libraries in it are loaded,
    which fails in the first step if its file system is mounted noexec, as /tmp of hardened
    machines."""
    asked = environ.get(variable)
    if not asked and variable != CACHES[0]:
        return None  # below the other one
    there = Path(asked).absolute() if asked else _temporary(environ)
    while asked and not os.path.exists(there) and there != there.parent:
        there = there.parent  # torch creates it
    if not _writable(there):
        text = msg("host.toolchain.not_writable", folder=there)
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        text = msg("host.toolchain.noexec", folder=there)
    else:
        return None
    return text, f"unset {variable}" if asked else f"export {variable}=~/.cache/torchinductor"


def _temporary(environ: Mapping[str, str]) -> Path:
    """The folder that tempfile chooses for torch; without a usable one the first."""
    named = [folder for name in ("TMPDIR", "TEMP", "TMP") if (folder := environ.get(name))]
    folders = [Path(folder).absolute() for folder in (*named, *TEMPORARY)]
    return next(filter(_writable, folders), folders[0])


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
