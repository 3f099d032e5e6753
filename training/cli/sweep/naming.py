"""Names of a sweep and its runs, and the folder that a new or known sweep has."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli.sweep import config_files, grid
from training.core import sweep_dir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.sweep_dir import COMMAND, SweepDir
from training.plan.request import Request

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord, SweepRun

LONGEST = 80  # bytes of a name


def find(
    given: str,
    record: SweepRecord,
    request: Request,
    values: Sequence[Mapping[str, str]],
) -> tuple[SweepDir, SweepRecord | None]:
    """The folder, and the record if this is the command of an existing sweep. Names the runs.
    `given`: --name. Raises UserError."""
    experiments = request.experiments
    for name in [given] if given else sweep_dir.names(experiments):
        folder = SweepDir(experiments, name)
        known = sweep_dir.read(folder)
        if known and _same(known, record) and not config_files.all_lost(folder, known):
            return folder, known
    name = given or _free(experiments, f"{_plain(request.base_name)}_sweep")
    folder = SweepDir(experiments, name)
    for run, named in zip(record["runs"], grid.run_names(name, values), strict=True):
        run["name"] = named
    if folder.exists():
        raise UserError(taken(folder))
    there = [run["name"] for run in record["runs"] if (experiments / run["name"]).exists()]
    if there:
        what = msg("cli.sweep.runs_taken", count=len(there), path=experiments / there[0])
        raise UserError(_taken(folder, what, []))
    return folder, None


def _same(known: SweepRecord, record: SweepRecord) -> bool:
    return (
        known["cwd"] == record["cwd"]
        and known["ranks"] == record["ranks"]
        and len(known["runs"]) == len(record["runs"])
        and all(map(_same_run, known["runs"], record["runs"]))
    )


def _same_run(known: SweepRun, run: SweepRun) -> bool:
    config = run.get("config_sha256")
    return known["args"] == run["args"] and known.get("config_sha256", config) == config


def _plain(base: str) -> str:
    """The name of a config, with the characters and the length that --run_name allows."""
    plain = re.sub(r"[^\w.-]+", "_", base).encode()[: LONGEST - 20].decode(errors="ignore")
    return plain.strip("._-") or "runs"


def _free(experiments: Path, base: str) -> str:
    number, name = 1, base
    while SweepDir(experiments, name).exists():
        number += 1
        name = f"{base}_{number}"
    return name


def wrong(name: str) -> list[Problem]:
    """The problem with --name."""
    valid = all(c.isalnum() or c in "._-" for c in name) and not name.startswith((".", "-"))
    if valid and len(os.fsencode(name)) <= LONGEST:
        return []
    what, allowed = msg("cli.sweep.name", name=name), msg("cli.sweep.name_allowed")
    return [Problem("sweep.name", what, allowed, [], "name")]


def taken(folder: SweepDir) -> Problem:
    what = msg("cli.sweep.name_taken", name=folder.name, folder=folder.path)
    known = sweep_dir.read(folder)
    if known and config_files.all_lost(folder, known):
        return _taken(folder, what, [])
    return _taken(folder, what, [f"{COMMAND} --resume={shlex.quote(folder.name)}"])


def _taken(folder: SweepDir, what: str, fixes: list[str]) -> Problem:
    again = f"{COMMAND} … --name={shlex.quote(f'{folder.name}_2')}"
    return Problem("sweep.name_taken", what, msg("cli.sweep.name_free"), [again, *fixes], "name")
