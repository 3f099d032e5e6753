"""Run lookup for every command that reads runs: a run directory, its name in experiments/, a file
of `./duet archive`, or the newest run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import owner, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import WORK
from training.core.rundir import RunDir
from training.core.suggest import suggest

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

EXPERIMENTS = "experiments"
LATEST = "latest"
VERSION = re.compile(r"(\.v?\d[\d.-]*)?")  # suffix of a folder's name
FIRST_RUN = "./train_dual_gpu.sh configs/dual_gpu/quickstart.py"


@dataclass(frozen=True)
class RunSelector:
    """How a command spells its run argument: `argument` as in its help, `named` before the name of
    a run, `newest` for the newest run, `rest` what follows the run."""

    argument: str
    named: str
    newest: str
    rest: str = ""

    def command(self, name: str) -> str:
        return " ".join(filter(None, [self.named + shlex.quote(name), self.rest]))


@dataclass(frozen=True)
class Closed:
    """A folder that this user may not read: that of a run, or one around it."""

    folder: Path
    is_run: bool

    def reason(self) -> str:
        return msg("core.find_run.closed", folder=self.folder, user=owner.name(self.folder))

    def problem(self, what: str) -> Problem:
        quoted, user = shlex.quote(str(self.folder)), owner.name(self.folder)
        opened = msg("core.owner.opened", folder=quoted, owner=user)
        # one around it, such as a home folder, contains more than the run
        fixes = [opened] if self.is_run else []
        return Problem("run.closed", what, msg("core.find_run.readable"), fixes)


def find(wanted: str | None, experiments: Path, asker: RunSelector) -> RunDir:
    """The run named `wanted`; None: the newest run. Raises UserError."""
    if wanted is not None:
        return _named(wanted, experiments, asker)
    run = newest(experiments)
    if run is None:
        fixes = [FIRST_RUN, f"{asker.named}/another/folder/RUN"]
        raise UserError(
            Problem(
                "run.none",
                msg("core.find_run.none", experiments=experiments),
                msg("core.find_run.existing"),
                fixes,
            )
        )
    return run


def several(words: Sequence[str], asker: RunSelector) -> list[Problem]:
    """The problem with more than one run, for commands of one."""
    if len(words) < 2:
        return []
    what = msg("core.find_run.several", count=len(words), runs=", ".join(map(repr, words)))
    fixes = [asker.command(word) for word in words]
    return [Problem("run.several", what, msg("monitor.option.one_of_them"), fixes)]


def path_of(typed: str) -> Path:
    """A typed path with `~` expanded; `~` of an unknown user is kept, as in a shell."""
    return Path(os.path.expanduser(typed))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def as_started(typed: str, plan: Plan) -> str:
    """A relative path as it was typed at the start of the run of this plan: in the folder of its
    command, unless it is there no longer."""
    command = plan.get("command")
    if not (typed and command):
        return typed
    here = path_of(typed)
    there = Path(command["cwd"]) / here
    same = exists(here) and exists(there) and here.samefile(there)
    return typed if same or not exists(there) else str(there)


def with_name(path: Path) -> Path:
    """`path`, absolute; its last part is a name, also of `..`. Links are kept."""
    return path.resolve() if path.name == ".." else path.absolute()


def folder(typed: str, *, default: bool) -> Path:
    """A default folder is relative to the project, a folder that the user names to the current
    directory."""
    path = path_of(typed)
    return WORK / path if default else path.absolute()


def is_folder(path: Path) -> bool:
    """False also where Path.is_dir raises: a name that is too long, or a place that may not be
    examined."""
    return os.path.isdir(path)


def is_lost_folder(path: Path, root: Path) -> bool:
    """Whether this path below `root` is a link to what may be a folder of a disk that is not
    mounted: its name has no suffix but a version."""
    if not path.is_symlink() or not VERSION.fullmatch(path.suffix):
        return False
    try:
        path.stat()
    except FileNotFoundError:
        around = Path(os.path.realpath(path)).parent
        present = [Path(os.path.realpath(root / f)) for f in path.relative_to(root).parents]
        with contextlib.suppress(OSError):
            return _may_lack_disk(around, present)
    except OSError:
        pass
    return False


def _may_lack_disk(around: Path, present: Iterable[Path]) -> bool:
    """Whether a folder of `around` may be on a disk that is not mounted: `around` contains no file.
    `present`: folders whose disks are mounted."""
    there = next(folder for folder in (around, *around.parents) if folder.exists())
    # below them, only an empty folder may be a mount point
    if any(map(there.is_relative_to, present)) and not _is_empty(there):
        return False
    is_top = around == around.parent
    return is_top or there != around or not _has_file(around)


def _is_empty(folder: Path) -> bool:
    with os.scandir(folder) as entries:  # Path.iterdir lists the whole folder
        return next(entries, None) is None


def _has_file(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_file(Path(entry)) for entry in entries)


def is_file(path: Path) -> bool:
    """As is_folder."""
    return os.path.isfile(path)  # noqa: PTH113 – see above


def exists(path: Path) -> bool:
    return os.path.exists(path)


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
    def missing(there: str) -> str:
        return msg("core.find_run.missing", argument=asker.argument, wanted=wanted, there=there)

    for path in (path_of(wanted), experiments / wanted):
        if is_archive(path):
            from training.core import archive

            return archive.opened(path)
        if is_run(RunDir(path)):
            return RunDir(with_name(path))

    if found := closed(wanted, experiments):
        raise UserError(found.problem(missing(found.reason())), Exit.RESOURCES)
    names = [plan.parent.name for plan in experiments.glob("*/plan.json")]
    fixes = [
        asker.command(name) for name in suggest(wanted.rstrip("/").rsplit("/", 1)[-1], names)[:1]
    ]
    if is_run(RunDir(Path(wanted).parent)):  # one of its files was named
        fixes.insert(0, asker.command(str(Path(wanted).parent)))
    fixes.append(msg("core.find_run.newest", newest=asker.newest) if names else FIRST_RUN)
    there = (
        msg("core.find_run.no_run_files")
        if os.path.isdir(wanted)
        else msg("core.find_run.not_a_run")
    )
    allowed = msg("core.find_run.run_or_name", experiments=experiments)
    raise UserError(Problem("run.missing", missing(there), allowed, fixes))


def closed(wanted: str, experiments: Path) -> Closed | None:
    """Whether this user may not read the run of this name, or a folder around it."""
    for path in (path_of(wanted).absolute(), experiments / wanted):
        there = path
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        needed = os.X_OK | (os.R_OK if there == path else 0)
        if os.path.isdir(there) and not os.access(there, needed):
            return Closed(there, is_run=there == path)
    return None


def is_archive(path: Path) -> bool:
    return path.name.endswith(rundir.ARCHIVES) and os.path.isfile(path)  # noqa: PTH113 – any name


def newest(experiments: Path) -> RunDir | None:
    """The most recently planned run in `experiments`."""
    return RunDir(max(found)[1]) if (found := planned(experiments)) else None


def folders(experiments: Path) -> list[Path]:
    """Its folders that can be examined, without hidden ones. Raises OSError if it cannot be
    read."""
    found = []
    with os.scandir(experiments) as entries:
        for entry in entries:
            # a link in a circle, or into a folder of another user
            with contextlib.suppress(OSError):
                if not entry.name.startswith(".") and entry.is_dir():
                    found.append(Path(entry.path))
    return found


def planned(experiments: Path) -> list[tuple[int, Path]]:
    """(time of its plan in ns, folder) of every run; [] if the folder cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for folder in folders(experiments):
            with contextlib.suppress(OSError):
                found.append((RunDir(folder).plan.stat().st_mtime_ns, folder))
    return found
