"""What torch.compile needs on this machine: it builds C code on a GPU too (Triton's launchers).
Triton and Inductor take the value of CC or CXX as one program, without arguments."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# device → variable that names the compiler, otherwise these, and the Debian package
_COMPILERS = {"cuda": ("CC", ("gcc", "clang"), "gcc"), "cpu": ("CXX", ("g++",), "g++")}


def missing(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What is missing on this machine → the Debian package that has it."""
    variable, usual, package = _COMPILERS[device]
    asked = environ.get(variable)
    path = environ.get("PATH")
    found = any(shutil.which(program, path=path) for program in ([asked] if asked else usual))
    lacks = {} if found else {asked or package: package}
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacks["Python.h"] = "python3-dev"
    return lacks
