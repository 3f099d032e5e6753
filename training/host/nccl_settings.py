"""The settings of NCCL in its files, which count like variables of the environment."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path

PREFIX = "NCCL_"
FILE = "NCCL_CONF_FILE"  # instead of the one in the home folder
OF_SYSTEM = Path("/etc/nccl.conf")
OF_USER = ".nccl.conf"


def effective(environ: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables with this environment, which has priority, also with empty values."""
    found = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    for file in _files(environ):
        for name, value in _lines(file):
            if name.startswith(PREFIX):
                found.setdefault(name, value)
    return found


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """As ncclInitEnv reads them; the first one has priority."""
    if named := environ.get(FILE):
        yield Path(named)
    elif home := _home():
        yield home / OF_USER
    yield OF_SYSTEM


def _home() -> Path | None:
    """NCCL's: not by $HOME."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container with any user ID
        return None


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """NAME=VALUE, blanks included. Only a `#` in the first column begins a comment."""
    try:
        content = file.read_bytes() if file.is_file() else b""
    except OSError:  # NCCL ignores it, too
        return
    for line in content.decode(errors="backslashreplace").split("\n"):
        name, assigned, value = line.partition("=")
        if assigned and not name.startswith("#"):
            yield name, value
