"""The number of files that a disk can hold."""

from __future__ import annotations

import os
from pathlib import Path

FEW = 16  # the process that got the error has removed some files since then


def exhausted(folder: Path) -> bool:
    """Whether the disk takes no more files, whatever its free bytes. Raises OSError."""
    facts = os.statvfs(folder)
    return facts.f_files > 0 and facts.f_favail < FEW  # btrfs counts none
