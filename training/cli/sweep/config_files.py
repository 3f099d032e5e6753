"""The files of a sweep that a run which starts later needs: its config must not have other values
than those of the table, and its weights must still exist."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config import flags
from training.core.errors import Problem, UserError
from training.core.find_run import is_file, is_folder, path_of
from training.core.messages import msg
from training.core.project import shipped

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord, SweepRun


def digest(file: Path | None) -> str:
    """The sha256 of its content; '' without a file, or for one that cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


def folder(record: SweepRecord, experiments: Path) -> str:
    """The folder in which the runs of a sweep start: that of the first start or, if it was moved,
    the current one with the files that runs without a configuration need. Raises UserError."""
    if is_folder(Path(record["cwd"])):
        return record["cwd"]
    here = os.getcwd()
    for run in record["runs"]:
        if (experiments / run["name"]).exists():
            continue
        line = flags.parse(run["args"], tasks.everything())
        task = line.flags.get("task", ("", ""))[0]
        needed = [of(run, here), Path(here, path_of(task)) if task.endswith(".py") else None]
        for file in filter(None, needed):
            if not is_file(file):
                what = msg("cli.sweep.folder_lost", cwd=record["cwd"], file=file)
                fixes = ["cd /another/folder"]
                raise UserError(
                    Problem("sweep.folder_lost", what, msg("cli.sweep.folder_allowed"), fixes)
                )
    return here


def of(run: SweepRun, cwd: str) -> Path | None:
    """The config of a run that was typed in `cwd`."""
    line = flags.parse(run["args"], tasks.everything())
    words = [line.flags["config"][0]] if "config" in line.flags else line.positional
    if not words:
        return None
    there = Path(cwd, path_of(words[0]))
    return there if is_file(there) else shipped(path_of(words[0]))


def lacks_weights(run: SweepRun) -> bool:
    """Whether the weights of the first start (--init_from) no longer exist."""
    file = run.get("init_from")
    return bool(file) and not is_file(Path(str(file)))


def changed(run: SweepRun, cwd: str) -> Problem | None:
    """The problem of a run whose config or weights are no longer those of the first start. A
    missing config is a problem of the run itself."""
    allowed = msg("cli.sweep.config_allowed")
    if lacks_weights(run):
        what = msg("cli.sweep.weights_lost", file=run.get("init_from"))
        return Problem("sweep.weights_lost", what, allowed, field="init_from")
    file, known = of(run, cwd), run.get("config_sha256")
    now = digest(file)
    if not known or not now or now == known:
        return None
    what = msg("cli.sweep.config_changed", file=file)
    return Problem("sweep.config_changed", what, allowed, field="config")
