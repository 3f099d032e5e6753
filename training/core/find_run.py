"""Run lookup for every command that reads runs: a run directory, its name in experiments/, or the
newest run."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from training.core import rundir
from training.core.errors import Problem, UserError
from training.core.rundir import RunDir
from training.core.suggest import suggest

EXPERIMENTS = "experiments"
LATEST = "latest"
FIRST_RUN = "./train_dual_gpu.sh configs/dual_gpu/quickstart.py"


@dataclass(frozen=True)
class RunSelector:
    """How a command spells its run argument: `argument` as in its help, `named` before the name of
    a run, `newest` for the newest run."""

    argument: str
    named: str
    newest: str

    def command(self, name: str) -> str:
        return self.named + shlex.quote(name)


def find(wanted: str | None, experiments: Path, asker: RunSelector) -> RunDir:
    """The run named `wanted`; None: the newest run. Raises UserError."""
    if wanted is not None:
        return _named(wanted, experiments, asker)
    run = newest(experiments)
    if run is None:
        fixes = [FIRST_RUN, f"{asker.named}/another/folder/RUN"]
        raise UserError(
            Problem("run.none", f"there is no run in {experiments} yet", "an existing run", fixes)
        )
    return run


def path_of(typed: str) -> Path:
    """A typed path with `~` expanded; `~` of an unknown user is kept, as in a shell."""
    return Path(os.path.expanduser(typed))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def newest(experiments: Path) -> RunDir | None:
    try:
        return rundir.newest(experiments)
    except OSError:  # removed during the search
        return None


def is_run(run: RunDir) -> bool:
    """Whether `run` contains any file of a run; one without its plan can still be shown."""
    files = (
        run.plan,
        run.metrics,
        run.events,
        run.summary,
        run.failure,
        run.supervisor,
        run.heartbeats,
    )
    return any(os.path.exists(file) for file in files)


def _named(wanted: str, experiments: Path, asker: RunSelector) -> RunDir:
    for path in (path_of(wanted), experiments / wanted):
        if is_run(RunDir(path)):
            return RunDir(path.absolute())

    names = [plan.parent.name for plan in experiments.glob("*/plan.json")]
    fixes = [
        asker.command(name) for name in suggest(wanted.rstrip("/").rsplit("/", 1)[-1], names)[:1]
    ]
    if is_run(RunDir(Path(wanted).parent)):  # one of its files was named
        fixes.insert(0, asker.command(str(Path(wanted).parent)))
    fixes.append(f"{asker.newest}   # the newest run" if names else FIRST_RUN)
    there = "a folder without any file of a run" if os.path.isdir(wanted) else "not a run directory"
    what = f"{asker.argument} is {wanted!r}: {there}"
    raise UserError(
        Problem(
            "run.missing", what, f"a run directory, or the name of a run in {experiments}", fixes
        )
    )
