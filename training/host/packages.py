"""The packages of requirements.in: those that every run needs, and what is off without each of the others.

Standard library only and nothing imported: lib/environment.py asks before anything is installed. A package is there when the
interpreter would find its module, whoever has installed it (pip, conda, a build of one's own).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from training.core.project import ROOT

REQUIRED = {"torch": "torch", "numpy": "numpy", "psutil": "psutil", "nvidia-ml-py": "pynvml", "tqdm": "tqdm"}  # package → module


@dataclass(frozen=True)
class Optional:
    module: str
    off: str  # without it


OPTIONAL = {
    "py-spy": Optional("", "no stacks of hung ranks"),  # a program, see program()
    "google-re2": Optional("re2", "slower log search"),
    "vl-convert-python": Optional("vl_convert", "no charts in report.html"),
    "tensorboard": Optional("tensorboard", "no TensorBoard files"),
    "wandb": Optional("wandb", "no W&B"),
    "pillow": Optional("PIL", "no video tasks"),
}


def found(module: str) -> bool:
    """Would `import module` find something? Top-level modules only."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def program(name: str) -> str | None:
    """A program that a package has installed: beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def lacking(names: Iterable[str]) -> list[str]:
    """Those of these packages, required or optional, that this interpreter does not have."""
    modules = REQUIRED | {name: one.module for name, one in OPTIONAL.items()}
    return [name for name in names if not (found(modules[name]) if modules[name] else program(name))]


def install(names: Iterable[str]) -> str:
    """The command that brings these packages into the environment of this interpreter; optional ones as they are locked."""
    locked = _locked()
    words = [f"{name}=={locked[name]}" if name in OPTIONAL and name in locked else name for name in names]
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def _locked() -> dict[str, str]:
    """package → version in requirements.lock, for this Python."""
    try:
        lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    versions = {}
    for line in lines:
        if match := re.match(r"([\w.-]+)==(\S+)(?: ; python_full_version (<|>=) '3\.(\d+)')?$", line):
            name, version, sign, minor = match.groups()
            if sign is None or (sys.version_info[1] < int(minor)) == (sign == "<"):
                versions[name] = version
    return versions


def missing_text(lacks: Iterable[str]) -> str:
    """What is off without these optional packages, and the one command that brings them; '' without any."""
    names = list(lacks)
    if not names:
        return ""
    return f"not installed, so off: {', '.join(f'{OPTIONAL[n].off} ({n})' for n in names)}; try: {install(names)}"
