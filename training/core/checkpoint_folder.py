"""Checkpoint folders on disk: a folder named step_* is complete at any time, also when a process is
killed. Without torch, since the launcher copies checkpoints too."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from training.core import manifest
from training.core.messages import msg


def publish(work: Path, final: Path) -> None:
    """Give a complete folder its name; it replaces a checkpoint of the same step. Raises
    OSError."""
    os.chmod(work, 0o755)
    if final.exists():  # the same step after a resume
        remove(final)
    # sync the files before the folder gets its final name
    _sync(work)
    work.rename(final)
    _sync(final.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a process killed meanwhile leaves no
    partial folder with a checkpoint's name. Raises OSError."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, msg("core.manifest.link"))
    work = path.with_name(f"{manifest.TEMPORARY}{path.name}")
    shutil.rmtree(work, ignore_errors=True)
    path.rename(work)
    shutil.rmtree(work)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process had begun to write or remove."""
    for path in folder.glob(f"{manifest.TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
