"""Locks between processes: a file that exists only while it is held, or an existing folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

REMOVED = (errno.ENOENT, errno.ESTALE)  # ESTALE: on NFS, by another machine
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as Lustre without the option flock


def take(lock: IO[str], waits: Callable[[], None] | None = None) -> bool:
    """Lock an open file, after waiting for other processes; False where the file system has no
    locks. `waits()` is called before a wait; without it, BlockingIOError is raised instead. Raises
    OSError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waits is None:
            raise
        waits()
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def alone(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock file, after waiting for other processes, and remove it afterwards: True. False
    where the file system has no locks. `waits()` is called before a wait. Raises OSError where the
    file cannot be created."""
    while True:
        with open(path, "w") as lock:
            try:
                locked = take(lock, waits)
                same = not locked or os.path.samestat(os.fstat(lock.fileno()), path.stat())
            except OSError as error:
                if error.errno not in REMOVED:
                    raise
                continue
            # the previous holder removed the file: another process may hold a new one
            if not same:
                continue
            if not locked:
                path.unlink(missing_ok=True)
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold an existing folder, after waiting for other processes. Where the file system has no
    locks, nothing is held. Raises OSError where the folder cannot be opened."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
