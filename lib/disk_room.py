"""Room on the disk for the environment that lib/environment.py creates: whether there is enough,
and a disk that is full all the same, as by a quota. Standard library only."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from pathlib import Path

import old_environment

from training.core.messages import msg
from training.core.project import ROOT

WITH_CUDA_BYTES = 4_800_000_000  # of .venv with PyPI's torch and its CUDA libraries, measured
WHEELS_BYTES = 2_500_000_000  # of their wheels, estimated by compressing samples of the files
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
FULL = re.compile("|".join(os.strerror(number) for number in FULL_ERRORS))  # in output


def free(venv: Path) -> tuple[Path, int]:
    """The folder whose disk it will be on, and the free bytes there."""
    there = next(folder for folder in (venv, *venv.parents) if folder.exists())
    return there, shutil.disk_usage(there).free


def needed() -> int:
    """Bytes during the installation: pip unpacks beside the wheels, uv has them in its cache."""
    return WITH_CUDA_BYTES + (0 if shutil.which("uv") else WHEELS_BYTES)


def too_small(venv: Path) -> str:
    """Refuses a disk without room for the environment; only a warning where packages come from
    other sources than PyPI, which may have a CPU build, or on another platform."""
    import platform

    from training.core import log, units
    from training.host import package_sources

    there, room = free(venv)
    room += old_environment.size(venv)
    if room >= needed():
        return ""
    text = msg(
        "lib.environment.disk",
        folder=there,
        free=units.size(room),
        needed=units.size(needed()),
    )
    text += f"\n{_another_disk()}"
    if platform.machine() == "x86_64" and not package_sources.other_sources(os.environ):
        return text
    log.warning(text)
    return ""


def full(venv: Path, output: str) -> str:
    """Removes a half-made environment, which would keep the disk full; returns the problem.
    `output`: of the program that found no space."""
    if venv.is_dir() and not (venv / old_environment.STAMP).is_file():
        old_environment.empty(venv)
    problem = msg("lib.environment.disk_full", folder=venv, output=output)
    return f"{problem}\n{_another_disk()}"


def _another_disk() -> str:
    return msg("lib.environment.disk_try", folder=shlex.quote(str(ROOT / ".venv")))
