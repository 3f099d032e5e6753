"""Mounted file systems. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# The owner that they show may be that of the mount, for all files.
ONE_USER = ("9p", "cifs", "drvfs", "exfat", "fuse", "fuseblk", "ntfs3", "smb3", "vboxsf", "vfat")


def file_system(folder: Path) -> str:
    """Its type, such as `ext4`; "" if it is unknown."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""


def may_show_one_user(folder: Path) -> bool:
    """Whether the owner of a file there may be another one than that shown."""
    with suppress(OSError):
        return file_system(folder).partition(".")[0] in ONE_USER  # fuse.sshfs
    return False
