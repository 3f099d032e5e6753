"""The name of a run: --run_name must be usable as a folder, and free."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from training.config.schema import Config
from training.core import rundir
from training.core.errors import Problem
from training.core.messages import msg
from training.host.placement import NODE, Topology
from training.plan import running

NAME_CHARACTERS = msg("plan.run_name.characters")
MOST_BYTES = 128


def problems(
    config: Config,
    origins: Mapping[str, str],
    experiments: Path,
    resume_from: rundir.RunDir | None,
    place: Topology | None,
    again: Callable[..., str],
) -> list[Problem]:
    """Problems of --run_name. `again`: the user's own command with these flags changed."""
    name = config.run_name
    if not name or resume_from:
        return []
    given = msg("plan.run_name.given", name=name, origin=origins["run_name"])
    if (
        not all(c.isalnum() or c in "._-" for c in name)
        or name.startswith((".", "-"))
        or len(os.fsencode(name)) > MOST_BYTES
    ):
        plain = _cut(re.sub(r"[^\w.-]+", "_", name).strip("._-"), 64)
        return [
            Problem(
                "run_name.value",
                given,
                msg("plan.run_name.allowed", characters=NAME_CHARACTERS),
                [f"--run_name={plain}"] if plain else [],
            )
        ]
    if place and not place.leads:
        return []  # node 0 has already created it on a shared disk
    if place and place.kind == NODE and rundir.RunDir(experiments / name).machines.exists():
        return []  # it may continue without this machine (training.plan.writer)
    return taken(config, origins, experiments, again)


def taken(
    config: Config,
    origins: Mapping[str, str],
    experiments: Path,
    again: Callable[..., str],
    *,
    resumable: bool = True,
) -> list[Problem]:
    """Problems of a --run_name that names an existing run. `resumable`: not one that only this
    machine may have."""
    name = config.run_name
    run = rundir.RunDir(experiments / name)
    if os.path.lexists(run.path) and not is_remains(run):
        given = msg("plan.run_name.given", name=name, origin=origins["run_name"])
        numbered = (f"{_cut(name, 100)}_{n}" for n in itertools.count(2))
        free = next(other for other in numbered if not os.path.lexists(experiments / other))
        if pid := running.pid_of(run):
            what = msg("plan.run_name.running", given=given, path=run.path, pid=pid)
            fixes = running.fixes(run, pid)
        else:
            what = msg("plan.run_name.taken", given=given, path=run.path)
            plan = rundir.read_json(run.plan) if resumable else None
            fixes = [again(resume=name)] if plan and not plan.get("script") else []
        return [
            Problem(
                "run_name.taken",
                what,
                msg("plan.run_name.new"),
                [*fixes, again(run_name=free)],
            )
        ]
    return []


def is_remains(run: rundir.RunDir) -> bool:
    """Whether the folder has only what a start leaves that is killed before it has a plan. It
    cannot be resumed, so its name is free."""
    before = {run.heartbeats, run.ranks, run.checkpoints, run.preflight, run.argv, run.env}
    if run.path.is_symlink() or not run.path.is_dir():
        return False
    return all(
        path in before or (path.parent == run.path and path.name.startswith("."))
        for path in run.path.rglob("*")
    )


def _cut(name: str, most: int) -> str:
    """The first characters, of at most this many bytes."""
    return os.fsencode(name)[:most].decode(errors="ignore")
