"""What torch.compile needs on this machine: it builds C code on a GPU too (Triton's launchers).
Triton and Inductor take the value of CC or CXX as one program, without arguments."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from training.core.messages import msg
from training.host.gpus import Gpu

INSTALL = "sudo apt-get install"
# device → variable that names the compiler, otherwise these, and the Debian package
_COMPILERS = {"cuda": ("CC", ("gcc", "clang"), "gcc"), "cpu": ("CXX", ("g++",), "g++")}
TRITON_CAPABILITY = (7, 0)  # the oldest that Inductor accepts (torch/_inductor/scheduler.py)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def missing(device: str, environ: Mapping[str, str], gpus: Iterable[Gpu] = ()) -> dict[str, str]:
    """What is missing on this machine → a command that provides it, '' for none. `gpus`: those of
    the ranks."""
    variable, usual, package = _COMPILERS[device]
    asked = environ.get(variable)

    def known(*programs: str) -> bool:
        return any(shutil.which(program, path=environ.get("PATH")) for program in programs)

    lacks = {}
    if asked and not known(asked):
        named = f"{variable}={shlex.quote(asked)}"
        lacks[named] = f"unset {variable}" if known(*usual) else f"{INSTALL} {package}"
    elif not asked and not known(*usual):
        lacks[package] = f"{INSTALL} {package}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacks["Python.h"] = f"{INSTALL} python3-dev"
    for gpu in gpus:
        if gpu.capability and tuple(gpu.capability) < TRITON_CAPABILITY:
            lacks[msg("host.toolchain.too_old", name=gpu.name)] = ""
    return lacks | dict(filter(None, (_cache(name, environ) for name in CACHES)))


def _cache(variable: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A folder for compiled code that cannot be used, and a command. Libraries in it are loaded,
    which fails in the first step if its file system is mounted noexec, as /tmp of hardened
    machines."""
    asked = environ.get(variable)
    if not asked and variable != CACHES[0]:
        return None  # below the other one
    there = Path(asked or environ.get("TMPDIR") or "/tmp").absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not (os.access(there, os.W_OK | os.X_OK) and there.is_dir()):
        text = msg("host.toolchain.not_writable", folder=there)
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        text = msg("host.toolchain.noexec", folder=there)
    else:
        return None
    return text, f"unset {variable}" if asked else f"export {variable}=~/.cache/torchinductor"
