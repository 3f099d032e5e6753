"""The permissions that a new file of this process gets."""

from __future__ import annotations

import contextlib
import os


def use(path: str | os.PathLike[str]) -> None:
    """Give a file or folder of `tempfile`, which only its owner may read, the permissions of any
    new one. Raises OSError."""
    os.chmod(path, (0o777 if os.path.isdir(path) else 0o666) & ~_umask())


def _umask() -> int:
    """os.umask() would set it, for all threads."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
