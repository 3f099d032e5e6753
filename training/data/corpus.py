"""Files behind a `data` value, by names, sizes and for an unusual name the first bytes; readers.py
reads the text."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.core import find_run
from training.core.errors import Problem
from training.core.messages import msg
from training.data.encoding import is_plain

STDLIB = "stdlib"
FORMS = (".txt", ".jsonl", ".parquet")
SUFFIXES = (*FORMS, ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst")
NAMED = msg("data.corpus.named")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
NOT_ONE_TEXT = (".json", ".csv", ".tsv", ".xml", ".html", ".ipynb")  # hardly meant as one document
FIRST_BYTES = 8000
# Not part of every Python installation, or not typical text: tests contain tables and invalid
# encodings.
STDLIB_WITHOUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "__pycache__",
    "lib-dynload",
}


@dataclass(frozen=True)
class CorpusSource:
    """Files of a corpus in a fixed order. `name`: for display and folder names; `encoding`: of the
    text files that are not UTF-8, "" if all must be UTF-8."""

    name: str
    files: tuple[Path, ...]
    total_bytes: int
    encoding: str = ""


def find(
    data: str, origin: str = "", encoding: str = ""
) -> tuple[CorpusSource | None, Problem | None]:
    """The source for a `data` value, or what is wrong with it. `origin`: where the value was set;
    `encoding`: of the files that are not UTF-8."""
    if data == STDLIB:
        return _stdlib()
    name_of_encoding = "" if not encoding or is_plain(encoding) else encoding
    path = Path(os.path.expanduser(data))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    given = msg("data.corpus.given", data=data) + (
        msg("data.corpus.origin", origin=origin) if origin else ""
    )
    allowed = msg("data.corpus.allowed", NAMED=NAMED, others=", ".join(NOT_ONE_TEXT))
    if not os.path.exists(path):
        return None, _missing(path, data, given, allowed)
    if path.is_dir():
        # Opening a named pipe would block. A link that is dangling, or leads where this user may
        # not look (is_file() raises), is reported below.
        try:
            below = _walk(path, SUFFIXES, {"lost+found"}, _raise)
        except OSError as error:
            return None, _unreadable(given, Path(error.filename), error, "u+rx")
        files = [f for f in below if not os.path.exists(f) or f.is_file()]
        if not files:
            return None, Problem(
                "data.no_files",
                msg("data.corpus.no_files", given=given, NAMED=NAMED),
                allowed,
                [f"ls {shlex.quote(str(path))}"],
            )
    elif path.is_file() and (path.name.lower().endswith(SUFFIXES) or _is_text(path)):
        files = [path]
    else:
        return None, Problem(
            "data.suffix", msg("data.corpus.suffix", given=given, NAMED=NAMED), allowed
        )
    total = 0
    for file in files:
        try:
            with file.open("rb"):
                total += file.stat().st_size
        except OSError as error:
            return None, _unreadable(given, file, error, "u+r")
    if total == 0:
        return None, Problem(
            "data.empty", msg("data.corpus.empty", given=given), msg("data.corpus.some_text")
        )
    name = path.resolve().name
    suffix = next(
        (s for s in sorted(SUFFIXES, key=len, reverse=True) if name.lower().endswith(s)),
        path.resolve().suffix,
    )
    return CorpusSource(
        name[: len(name) - len(suffix)] or name or "data", tuple(files), total, name_of_encoding
    ), None


def _is_text(file: Path) -> bool:
    """Whether a file without a usual suffix is one document: `notes.md`, `main.c`, `README`."""
    if file.suffix.lower() in (*COMPRESSED, *NOT_ONE_TEXT):
        return False
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(FIRST_BYTES)
    except OSError:  # reported as any unreadable file
        return True


def _missing(path: Path, data: str, given: str, allowed: str) -> Problem:
    """Problem for a missing path. Its fixes never suggest other data, only where to look."""
    if "://" in data:
        return Problem(
            "data.not_downloaded",
            msg("data.corpus.url", given=given),
            allowed,
        )
    there = path.absolute().parent
    if any(c in path.name for c in "*?[") and os.path.isdir(there):
        return Problem(
            "data.missing",
            msg("data.corpus.pattern", given=given),
            allowed,
            [f"ls {shlex.quote(str(there))}"],
        )
    while not os.path.isdir(there) and there != there.parent:
        there = there.parent
    return Problem(
        "data.missing",
        msg("data.corpus.missing", given=given),
        allowed,
        [f"ls {shlex.quote(str(there))}"],
    )


def _stdlib() -> tuple[CorpusSource | None, Problem | None]:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, (".py",), STDLIB_WITHOUT)
    total = sum(f.stat().st_size for f in files)
    if total < 1 << 20:
        return None, Problem(
            "data.stdlib_missing",
            msg("data.corpus.stdlib", root=root, total=total),
            msg("data.corpus.text"),
            ["--data=YOUR_TEXT.txt"],
        )
    return CorpusSource(STDLIB, tuple(files), total), None


def _unreadable(given: str, path: Path, error: OSError, mode: str) -> Problem:
    allowed = [f"chmod {mode} {shlex.quote(str(path))}"]
    return Problem(
        "data.unreadable",
        msg("data.corpus.unreadable", given=given, file=path, strerror=error.strerror),
        msg("data.corpus.readable"),
        allowed if isinstance(error, PermissionError) else [],
    )


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    without: set[str],
    failed: Callable[[OSError], None] | None = None,
) -> list[Path]:
    """The files below `root`, also through links. Each folder and file is listed once: copies of a
    text would be trained on repeatedly, or be part of training and validation. `failed`: called for
    a folder that cannot be read; without it, its files are left out."""
    found: list[Path] = []
    visited = {os.path.realpath(root)}
    for folder, inner, names in os.walk(root, followlinks=True, onerror=failed):
        real = os.path.realpath(folder)  # once: each part of a path may be a request to a server
        inner[:] = sorted(d for d in inner if d not in without and not d.startswith("."))
        inner[:] = [d for d in inner if _new(Path(folder, d), real, visited)]
        for file in (Path(folder, n) for n in sorted(names) if not n.startswith(".")):
            if not file.name.lower().endswith(suffixes):
                if failed and find_run.is_lost_folder(file, root):
                    failed(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)))
            elif _new(file, real, visited):
                found.append(file)
    return found


def _raise(error: OSError) -> None:
    """A training without the files of this folder would look complete."""
    raise error


def _new(path: Path, folder: str, visited: set[str]) -> bool:
    """By the path without links: not every file system has inode numbers. `folder`: that of the
    folder around it."""
    real = os.path.realpath(path) if path.is_symlink() else os.path.join(folder, path.name)
    new = real not in visited
    visited.add(real)
    return new


def states(source: CorpusSource) -> dict[Path, tuple[int, int]]:
    """Size and time of the last change (ns) of each file; a file that is gone is missing."""
    found = {}
    for file in source.files:
        with contextlib.suppress(OSError):
            facts = file.stat()
            found[file] = (facts.st_size, facts.st_mtime_ns)
    return found


def changed(
    before: dict[Path, tuple[int, int]], after: dict[Path, tuple[int, int]]
) -> list[Problem]:
    """A problem for files that were written while they were read: only a part of them may have been
    read."""
    files = [file for file in before if before[file] != after.get(file)]
    if not files:
        return []
    first = files[0]
    size = after[first][0] if first in after else 0
    what = msg("data.corpus.changed", file=first, before=before[first][0], after=size)
    if len(files) > 1:
        what += msg("data.corpus.changed_too", count=len(files) - 1)
    return [Problem("data.changed", what, msg("data.corpus.complete"))]
