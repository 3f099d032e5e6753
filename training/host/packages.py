"""Required and optional packages of pyproject.toml, and the features that need the optional ones.

Standard library only, and no package is imported: lib/environment.py uses this module before
anything is installed. A package counts as installed if the interpreter finds its module, however
it was installed (pip, conda, a local build).
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

from training.core.messages import msg
from training.core.project import INSTALLED, ROOT

# package → module
REQUIRED = {
    "torch": "torch",
    "numpy": "numpy",
    "psutil": "psutil",
    "nvidia-ml-py": "pynvml",
    "tqdm": "tqdm",
}


@dataclass(frozen=True)
class Optional:
    module: str
    off: str  # effect of its absence


OPTIONAL = {
    "py-spy": Optional("", msg("host.package.py_spy")),  # an executable, see program()
    "google-re2": Optional("re2", msg("host.package.re2")),
    "vl-convert-python": Optional("vl_convert", msg("host.package.vl_convert")),
    "tensorboard": Optional("tensorboard", msg("host.package.tensorboard")),
    "wandb": Optional("wandb", msg("host.package.wandb")),
    "pillow": Optional("PIL", msg("host.package.pillow")),
    "safetensors": Optional("safetensors", msg("host.package.safetensors")),
}


def found(module: str) -> bool:
    """Whether `import module` would succeed. Top-level modules only."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def program(name: str) -> str | None:
    """Path of an executable next to this Python or on PATH; None if missing."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def lacking(names: Iterable[str]) -> list[str]:
    """The missing ones of these required or optional packages, for this interpreter."""
    modules = REQUIRED | {name: one.module for name, one in OPTIONAL.items()}
    return [
        name for name in names if not (found(modules[name]) if modules[name] else program(name))
    ]


def installer(python: str = sys.executable) -> list[str]:
    """The command that installs packages for this interpreter. `python`: its path as shown. A .venv
    that uv or another environment's pip has made has no pip."""
    if found("pip"):
        return [python, "-m", "pip", "install"]
    if shutil.which("uv"):
        return ["uv", "pip", "install", "--python", python]
    if shutil.which("pip"):
        return ["pip", "--python", python, "install"]
    return [python, "-m", "pip", "install"]


def install(names: Iterable[str]) -> str:
    """The command that installs these packages for this interpreter; optional ones in the locked
    version."""
    versions = _versions()
    words = [
        f"{name}=={versions[name]}" if name in OPTIONAL and name in versions else name
        for name in names
    ]
    return shlex.join([*installer(), *words])


def add(names: Iterable[str]) -> list[str]:
    """Commands that install packages of the section `extras`, for this interpreter first."""
    command = shlex.join([*installer(), *names])
    if INSTALLED:
        return [command]
    own = sys.prefix == str(ROOT / ".venv")
    return ["make extras"] if own else [command, msg("host.package.make_extras")]


def locked(section: str) -> list[str]:
    """The pins of a section of requirements.lock; `run` is the first one. Raises OSError."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    current = "run"
    for line in lines:
        if heading := re.match(r"# \[(\w+)\]", line):
            current = heading[1]
        elif line and not line.startswith("#"):
            found.setdefault(current, []).append(line)
    return found[section]


def _versions() -> dict[str, str]:
    """package → version in requirements.lock, for this Python."""
    try:
        pins = locked("run")
    except OSError:
        return {}
    versions = {}
    for pin in pins:
        if match := re.match(
            r"([\w.-]+)==(\S+)(?: ; python_full_version (<|>=) '3\.(\d+)')?$", pin
        ):
            name, version, sign, minor = match.groups()
            if sign is None or (sys.version_info[1] < int(minor)) == (sign == "<"):
                versions[name] = version
    return versions


def missing_text(lacks: Iterable[str]) -> str:
    """Effects of these missing optional packages, and the command that installs them; '' for an
    empty list."""
    names = list(lacks)
    if not names:
        return ""
    return msg(
        "host.package.missing",
        effects=", ".join(f"{OPTIONAL[n].off} ({n})" for n in names),
        install=install(names),
    )
