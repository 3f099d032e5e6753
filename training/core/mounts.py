"""Mounted file systems. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# They have no owners, so each mount shows one for all files. Others of FUSE, 9p and NTFS may show
# the real ones.
ONE_USER = ("exfat", "fuse.rclone", "vboxsf", "vfat")
SMB = ("cifs", "smb3")


def file_system(folder: Path) -> str:
    """Its type, such as `ext4`; "" if it is unknown."""
    return _mount(folder)[0]


def shows_one_user(folder: Path) -> bool:
    """Whether it certainly shows one owner for all files, also for those of others."""
    with suppress(OSError):
        kind, options = _mount(folder)
        return kind in ONE_USER or (kind in SMB and "forceuid" in options.split(","))
    return False


def _mount(folder: Path) -> tuple[str, str]:
    """Type and options of its file system; "" if they are unknown."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1], fields[-1]
    return "", ""
