"""Copy of the project's files at submission: what a job runs, whatever is edited meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training import tasks
from training.core.messages import msg
from training.core.project import NO_CODE
from training.core.units import plural

if TYPE_CHECKING:
    from training.core.contracts.run_files import CodeRecord

# Part of the code only if git tracks them; the job has the variables of the submission (code.env).
SECRETS = {".env", ".netrc"}
# A larger file that git does not track is data that a user put into the project.
LARGEST_UNTRACKED = 10 << 20
# So are the files of a folder, except Python files, if there are more or they are larger together.
CODE = ".py"
MOST_IN_FOLDER, LARGEST_FOLDER = 2000, 200 << 20


@dataclass(frozen=True)
class Code:
    """What was copied. `revision` and `changed` (does it differ from that revision?) are None
    without git."""

    revision: str | None
    changed: bool | None
    files: int
    left_out: list[str]  # larger than LARGEST_UNTRACKED
    folders: dict[str, int]  # of data → number of files not copied

    def record(self) -> CodeRecord:
        return cast("CodeRecord", asdict(self) | {"sentence": self.sentence()})

    def sentence(self) -> str:
        files = plural(self.files, "file")
        if self.revision is None:
            return msg("launcher.slurm.code.no_git", files=files)
        return (
            msg("launcher.slurm.code.changed", revision=self.revision[:12], files=files)
            if self.changed
            else msg("launcher.slurm.code.revision", revision=self.revision[:12], files=files)
        )


def take(root: Path, target: Path, without: Iterable[Path] = ()) -> Code:
    """Copy the project's code into the new folder `target`; nothing below `without`. Raises
    OSError."""
    known = _git(root, "ls-files", "-z", "--cached")
    revision = (_git(root, "rev-parse", "--verify", "-q", "HEAD") or "").strip() or None
    # a folder inside another project's repository
    if known is None or _git(root, "rev-parse", "--show-prefix") != "\n":
        names, tracked, revision, changed = list(_walk(root)), set(), None, None
    else:
        tracked = set(known.split("\0"))
        others = _git(root, "ls-files", "-z", "--others", "--exclude-standard") or ""
        names = sorted(filter(None, tracked | set(others.split("\0"))))
        changed = bool(_git(root, "status", "--porcelain"))
    out = [
        str(folder.relative_to(root)) + os.sep for folder in without if folder.is_relative_to(root)
    ]
    results = tuple(out)
    names = [n for n in names if n.split("/", 1)[0] not in NO_CODE and not n.startswith(results)]
    folders = _folders_of_data(root, [name for name in names if name not in tracked])
    left_out, count = [], 0
    target.mkdir()
    for name in names:
        source = root / name
        if not (source.is_file() or source.is_symlink()):
            continue  # deleted meanwhile; the folder of a submodule
        if name not in tracked and (source.name in SECRETS or _is_data(name, folders)):
            continue
        if name not in tracked and source.lstat().st_size > LARGEST_UNTRACKED:
            left_out.append(name)
            continue
        if _has_login(source):  # the plan has its path
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name, follow_symlinks=False)
        with contextlib.suppress(PermissionError):  # as umask.change()
            shutil.copystat(source, target / name, follow_symlinks=False)
        count += 1
    return Code(revision, changed, count, left_out, folders)


def _folders_of_data(root: Path, untracked: Iterable[str]) -> dict[str, int]:
    """The innermost folders with too many files, or too large ones, to be code, and how many."""
    files, size = Counter[str](), Counter[str]()
    for name in untracked:
        with contextlib.suppress(OSError):
            length = (root / name).lstat().st_size
            if not name.endswith(CODE) and length <= LARGEST_UNTRACKED:
                files[os.path.dirname(name)] += 1
                size[os.path.dirname(name)] += length
    found, above = dict[str, int](), {one for name in files for one in (name, *_above(name))}
    for folder in sorted(above, key=lambda name: name.count("/"), reverse=True):
        if files[folder] > MOST_IN_FOLDER or size[folder] > LARGEST_FOLDER:
            found[folder] = files[folder]
        elif parent := os.path.dirname(folder):
            files[parent] += files[folder]
            size[parent] += size[folder]
    return found


def _is_data(name: str, folders: Collection[str]) -> bool:
    return not name.endswith(CODE) and any(one in folders for one in _above(name))


def _above(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name


def link_rest(root: Path, target: Path, folder: Path, without: Collection[Path] = ()) -> list[str]:
    """Link what take() has not copied of a folder of the project, such as a task's data: names in
    `target` of the links. Not hidden files, which may hold secrets, and nothing in `without`."""
    made = []
    for live in sorted((root / folder).iterdir()):
        name, there = live.name, target / folder / live.name
        if (
            name.startswith(".")
            or name == "__pycache__"
            or (folder == Path() and name in NO_CODE)
            or live in without
            or _has_login(live)
        ):
            continue
        if not os.path.lexists(there):
            there.symlink_to(live.resolve())
            made.append(str(folder / name))
        elif live.is_dir() and there.is_dir() and not there.is_symlink():  # copied in part
            made += link_rest(root, target, folder / name, without)
    return made


def _has_login(file: Path) -> bool:
    """A larger file is data, which takes long to read."""
    small = file.is_file() and file.stat().st_size <= LARGEST_UNTRACKED
    return file.suffix == ".json" and small and tasks.login_key(file) is not None


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        left_out = NO_CODE if Path(folder) == root else set()  # training/data is code
        folders[:] = sorted(
            name
            for name in folders
            if name not in left_out and name != "__pycache__" and not name.startswith(".")
        )
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in files)


def _git(root: Path, *words: str) -> str | None:
    """None without git, or where this is not a repository of this user."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, env=environ, check=False
        )
    except OSError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
