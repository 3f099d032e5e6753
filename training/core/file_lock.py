"""Locks between processes, of one machine or of several with a common disk: a file that exists only
while it is held."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from training.core.project import NOT_WRITABLE

REMOVED = (errno.ENOENT, errno.ESTALE)  # ESTALE: on NFS, by another machine
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as Lustre without the option flock
READ_ONLY = errno.EBADF  # NFS locks only a file that is open for writing


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


def opened(path: Path, *, again: bool = True) -> IO[str]:
    """A lock file, made if it is missing; another user's may be read-only. Raises OSError."""
    try:
        return path.open("a")
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        with suppress(FileNotFoundError):
            return path.open()
        if not again:
            raise
    return opened(path, again=False)  # its holder may have removed it in between


@contextmanager
def alone(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock file, after waiting for other processes, and remove it afterwards: True. False
    where the file system has no locks, or none for this user on another one's file. `waits()` is
    called before a wait. Raises OSError where the file cannot be created."""
    lock = _locked(path, waits)
    if lock is None:
        yield False
        return
    with lock:
        try:
            yield True
        finally:
            _remove(path)


def _locked(path: Path, waits: Callable[[], None]) -> IO[str] | None:
    while True:
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(opened(path))
            except PermissionError:
                if path.exists():  # it may not even be read
                    return None
                raise
            try:
                if not take(lock, waits):
                    _remove(path)
                    return None
                # else the previous holder removed it: another process may hold a new one
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    stack.pop_all()
                    return lock
            except OSError as error:
                if error.errno == READ_ONLY:
                    return None
                if error.errno not in REMOVED:
                    raise


def _remove(path: Path) -> None:
    """The next process can take one that has to stay, as another user's in a sticky folder."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold an existing folder, after waiting for other processes: by a file in it, since NFS locks
    folders for one machine only. Nothing is held if the file system has no locks, or refuses the
    file."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(alone(folder / ".lock"))
        yield
