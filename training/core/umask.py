"""The permissions that a new file of this process gets."""

from __future__ import annotations

import contextlib
import os


def use(path: str | os.PathLike[str]) -> None:
    """Give a file or folder of `tempfile`, which only its owner may read, the permissions of any
    new one. Raises OSError."""
    change(path, (0o777 if os.path.isdir(path) else 0o666) & ~_umask())


def change(path: str | os.PathLike[str], mode: int) -> None:
    """chmod, except on a file system without permissions of its own: CIFS, exFAT and drvfs may
    refuse it. Raises OSError."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, mode)


def _umask() -> int:
    """os.umask() would set it, for all threads."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
