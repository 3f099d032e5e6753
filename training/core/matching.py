"""Entries of a folder by their name, also on a failing disk, where Path.glob raises."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from pathlib import Path


def matching(folder: Path, pattern: str) -> list[Path]:
    """Sorted; [] if the folder cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if fnmatch.fnmatchcase(e.name, pattern))
    return []
