"""Folder and record of a sweep: experiments/sweeps/<name>/. Its runs are ordinary run directories
next to that folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import manifest, rundir
from training.core.errors import Problem, UserError
from training.core.find_run import EXPERIMENTS, path_of
from training.core.jsonl import dig, items, text, whole
from training.core.messages import msg
from training.core.project import WORK
from training.core.rundir import RunDir
from training.core.suggest import suggest

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord, SweepRun

SWEEPS = "sweeps"  # in experiments/: not a run
VERSION = 1
COMMAND = "./duet sweep"


class SweepDir:
    """Paths of one sweep."""

    def __init__(self, experiments: Path, name: str) -> None:
        self.name, self.experiments = name, experiments
        self.path = experiments / SWEEPS / name
        self.record = self.path / "sweep.json"
        self.page = self.path / "report.html"
        self.lock = self.path / "sweep.lock"  # held by the process that runs the sweep

    def console(self, run: str) -> Path:
        """Output of the launcher of a run, of all its starts."""
        return self.path / f"{run}.log"

    def problems(self, run: str) -> Path:
        """The codes of its problems, one per line, which a refused start of a run leaves."""
        return self.path / f"{run}.problems"

    def create(self, record: SweepRecord) -> None:
        """Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        rundir.write_json(self.record, record)

    def exists(self) -> bool:
        """Whether there is a record, even a damaged one."""
        return os.path.lexists(self.record)  # Path raises for some names


def read(folder: SweepDir) -> SweepRecord | None:
    """The record; None if it is missing or damaged."""
    found = rundir.read_json(folder.record)
    runs = items(dig(found, "runs"))
    complete = (
        found is not None
        and whole(found.get("schema_version")) == VERSION
        and whole(found.get("ranks"))
        and text(found.get("cwd"))
        and text(found.get("device"))
        and runs
        and all(
            text(dig(run, "name")) and isinstance(dig(run, "values"), dict) and "args" in run
            for run in runs
        )
    )
    return cast("SweepRecord", found) if complete else None


def needed_weights(run: SweepRun, experiments: Path) -> Path | None:
    """The weights of the first start (--init_from) while a run still starts from them: it has
    neither a checkpoint nor a summary."""
    file, own = text(run.get("init_from")), RunDir(experiments / run["name"])
    if not file or own.summary.exists() or manifest.newest(own.checkpoints):
        return None
    return Path(file)


def names(experiments: Path) -> list[str]:
    """The newest first."""
    files = []
    for file in (experiments / SWEEPS).glob("*/sweep.json"):
        try:
            files.append((-file.stat().st_mtime_ns, file.parent.name))
        except OSError:  # removed meanwhile
            continue
    return [name for _, name in sorted(files)]


def at(wanted: str, experiments: Path) -> SweepDir:
    """The folder of the sweep named `wanted`, or at this path."""
    path = path_of(wanted).absolute()
    if path.parent.name == SWEEPS and os.path.isdir(path):
        return SweepDir(path.parent.parent, path.name)
    return SweepDir(experiments, wanted)


def command(option: str, name: str, experiments: Path) -> str:
    """./duet sweep --show=NAME or --resume=NAME for a sweep in `experiments`."""
    words = [f"--{option}={name}"]
    if experiments != WORK / EXPERIMENTS:
        words.append(f"--out_dir={experiments}")
    return f"{COMMAND} {shlex.join(words)}"


def find(
    wanted: str, experiments: Path, again: Callable[[str], str]
) -> tuple[SweepDir, SweepRecord]:
    """The sweep named `wanted`, or at this path. `again`: the command with another name, for
    suggestions. Raises UserError."""
    folder = at(wanted, experiments)
    record = read(folder)
    if record is not None:
        return folder, record
    there = names(experiments)
    if folder.exists():
        what = msg("core.sweep.damaged", file=folder.record)
        raise UserError(Problem("sweep.damaged", what))
    near = suggest(wanted.rstrip("/").rsplit("/", 1)[-1], there)[:1] or there[:1]
    raise UserError(
        Problem(
            "sweep.missing",
            msg("core.sweep.missing", wanted=wanted, folder=experiments / SWEEPS),
            ", ".join(there[:6]),
            [again(name) for name in near] or [f"{COMMAND} --help"],
        )
    )
