"""The files of a sweep that a run which starts later needs: its config must not have other values
than those of the table, and its weights must still exist."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config import flags
from training.core import sweep_dir
from training.core.errors import Problem, UserError
from training.core.find_run import is_file, is_folder, path_of
from training.core.messages import msg
from training.core.project import shipped
from training.core.sweep_dir import SweepDir
from training.monitor.run_status import FINISHED
from training.monitor.runs import sweep as sweep_runs

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


def changed(run: SweepRun, cwd: str, experiments: Path) -> Problem | None:
    """The problem of a run whose weights, or, if it is new, config differ from those of the first
    start. A missing config is a problem of the run itself."""
    allowed = msg("cli.sweep.config_allowed")
    if lost := _lost_weights(run, experiments):
        what = msg("cli.sweep.weights_lost", file=lost)
        return Problem("sweep.weights_lost", what, allowed, field="init_from")
    if (experiments / run["name"]).exists():
        return None  # a resumed one keeps its configuration
    file, known = of(run, cwd), run.get("config_sha256")
    now = digest(file)
    if not known or not now or now == known:
        return None
    what = msg("cli.sweep.config_changed", file=file)
    return Problem("sweep.config_changed", what, allowed, field="config")


def all_lost(folder: SweepDir, record: SweepRecord) -> bool:
    """Whether nothing of a sweep can be continued: all runs that are left need weights that no
    longer exist."""
    rows = sweep_runs.read(folder, record)
    left = [run for run, row in zip(record["runs"], rows, strict=True) if row.state != FINISHED]
    return bool(left) and all(_lost_weights(run, folder.experiments) for run in left)


def _lost_weights(run: SweepRun, experiments: Path) -> Path | None:
    file = sweep_dir.needed_weights(run, experiments)
    return file if file and not is_file(file) else None
