"""The hidden folder beside an output in which it is written, before it gets its name."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class WorkFolder:
    """Locked while its process lives, so that the next process with the same output can remove what
    a killed one has left. Where a file system has no locks, that stays. Raises OSError."""

    def __init__(self, out: Path) -> None:
        prefix = f".{out.name}.writing-"
        for left in out.parent.glob(f"{_literal(prefix)}*"):
            with suppress(OSError):
                if (lock := _lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
        self._lock: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(dir=out.parent, prefix=prefix))
            try:
                with suppress(OSError):
                    self._lock = _lock(self.path)
                if self.path.exists():  # otherwise another process took it for a leftover
                    return
            except BaseException:  # Ctrl-C
                self.remove()
                raise
            self.remove()

    def remove(self) -> None:
        """What is left of it, also after it was renamed."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the lock; None: another process has it. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def _literal(text: str) -> str:
    """As a pattern of glob."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
