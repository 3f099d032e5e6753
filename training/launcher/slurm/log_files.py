"""Log files that the user has chosen for a job (--output, --error). SLURM before 23.02 creates no
folder, and a job without that of its log ends without a message."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from training.core.errors import Problem
from training.core.messages import msg
from training.launcher.slurm import controller
from training.launcher.slurm.options import MORE, VALUED, SplitArgs

MAKES_FOLDERS = (23, 2)  # version of SLURM
_PATTERN = re.compile("%(.)")  # of sbatch: %u is the user, %% a percent sign


def problems(line: SplitArgs) -> list[Problem]:
    """Folders whose names are known only in the job, as of logs/%x/out.log, where SLURM does not
    make them."""
    unknown = [(name, text) for name, text in _given(line) if not _is_known(os.path.dirname(text))]
    if not unknown or _makes_folders():
        return []
    return [
        Problem(
            "slurm.log_folder",
            msg("launcher.slurm.options.log_folder", name=name, text=text),
            msg("launcher.slurm.options.log_folder_allowed"),
            [_fix(name, text)],
        )
        for name, text in unknown
    ]


def _makes_folders() -> bool:
    """Also if its version is unknown."""
    found = re.search(r"(\d+)\.(\d+)", controller.ask_once("--version", by="sbatch").out)
    return found is None or (int(found[1]), int(found[2])) >= MAKES_FOLDERS


def make_folders(line: SplitArgs) -> None:
    """Those whose names are known."""
    for _, text in _given(line):
        folder = os.path.dirname(text)
        if folder and _is_known(folder):
            # it may exist on the nodes alone; a user ID may have no name
            with contextlib.suppress(OSError, KeyError):
                name = _PATTERN.sub(_value, folder)
                Path(line.used("chdir") or "", name).mkdir(parents=True, exist_ok=True)


def _value(found: re.Match[str]) -> str:
    return getpass.getuser() if found[1] == "u" else "%"


def _given(line: SplitArgs) -> Iterator[tuple[str, str]]:
    for name in ("output", "error"):
        if text := line.used(name):
            yield name, text


def _is_known(folder: str) -> bool:
    return set(_PATTERN.findall(folder)) <= {"u", "%"}


def _fix(name: str, text: str) -> str:
    """The same words in the name of the file."""
    parts = text.split("/")
    at = next(i for i, part in enumerate(parts) if not _is_known(part))
    word = f"--{name}={'/'.join([*parts[:at], '_'.join(parts[at:])])}"
    return shlex.quote(word if name in VALUED else f"--{MORE}={word}")
