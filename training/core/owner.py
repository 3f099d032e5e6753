"""The users that files belong to. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import tempfile
from pathlib import Path

from training.core import mounts
from training.core.errors import DISK_FULL

OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def uid(path: Path) -> int | None:
    """That of the file itself, also if it is a link; None if it cannot be examined."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def name(path: Path) -> str:
    """That of its user; the number of one that this machine does not know."""
    found = uid(path)
    if found is None:
        return "?"
    try:
        return pwd.getpwuid(found).pw_name
    except KeyError:
        return str(found)


def other(path: Path) -> str:
    """The user whose file this is, if it is another one; "" for root, who acts for all. Access
    decides where the owner that is shown may not be the real one: a mount may map all users to
    one, a container all those that it does not know."""
    found, own = uid(path), os.geteuid()
    if found is None or own in (0, found):
        return ""
    if found == unknown() and os.access(path, os.W_OK):
        return ""
    folder = path.absolute().parent
    try:
        is_own = found == _new_files(folder)
    except OSError:
        is_own = mounts.shows_one_user(folder) and os.access(path, os.W_OK)
    return "" if is_own else name(path)


def unknown() -> int:
    """The user that the kernel shows in place of those that it cannot map."""
    with contextlib.suppress(OSError, ValueError):
        return int(OVERFLOW.read_text())
    return 65534


@functools.cache
def _new_files(folder: Path) -> int | None:
    """The user that the files that this one creates there belong to; None if it may create none.
    Raises OSError if the disk is full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        return None
