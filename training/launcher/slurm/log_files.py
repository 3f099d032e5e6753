"""Log files that the user has chosen for a job (--output, --error). SLURM creates no folder, and a
job without that of its log ends without a message."""

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
from training.launcher.slurm.options import MORE, VALUED, SplitArgs

_PATTERN = re.compile("%(.)")  # of sbatch: %u is the user, %% a percent sign


def problems(line: SplitArgs) -> list[Problem]:
    """Folders whose names are known only in the job, as of logs/%x/out.log."""
    return [
        Problem(
            "slurm.log_folder",
            msg("launcher.slurm.options.log_folder", name=name, text=text),
            msg("launcher.slurm.options.log_folder_allowed"),
            [_fix(name, text)],
        )
        for name, text in _given(line)
        if not _is_known(os.path.dirname(text))
    ]


def make_folders(line: SplitArgs) -> None:
    known = {"u": getpass.getuser(), "%": "%"}
    for _, text in _given(line):
        folder = _PATTERN.sub(lambda found: known[found[1]], os.path.dirname(text))
        if folder:
            with contextlib.suppress(OSError):  # it may exist on the nodes alone
                Path(line.option("chdir") or "", folder).mkdir(parents=True, exist_ok=True)


def _given(line: SplitArgs) -> Iterator[tuple[str, str]]:
    for name in ("output", "error"):
        if text := line.option(name):
            yield name, text


def _is_known(folder: str) -> bool:
    return set(_PATTERN.findall(folder)) <= {"u", "%"}


def _fix(name: str, text: str) -> str:
    """The same words in the name of the file."""
    parts = text.split("/")
    at = next(i for i, part in enumerate(parts) if not _is_known(part))
    word = f"--{name}={'/'.join([*parts[:at], '_'.join(parts[at:])])}"
    return shlex.quote(word if name in VALUED else f"--{MORE}={word}")
