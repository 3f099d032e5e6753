"""What torch.compile needs on this machine: it builds C code on a GPU too (Triton's launchers).
Triton and Inductor take the value of CC or CXX as one program, without arguments."""

from __future__ import annotations

import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

INSTALL = "sudo apt-get install"
# device → variable that names the compiler, otherwise these, and the Debian package
_COMPILERS = {"cuda": ("CC", ("gcc", "clang"), "gcc"), "cpu": ("CXX", ("g++",), "g++")}


def missing(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What is missing on this machine → a command that provides it."""
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
    return lacks
