"""Checkpoint folders on disk: a folder named step_* is complete at any time, also when a process is
killed. Without torch, since the launcher copies checkpoints too."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

from training.core import manifest, umask
from training.core.matching import matching
from training.core.messages import msg
from training.core.work_folder import sync

# As named by new_work(); a folder that is being removed has no suffix.
WRITTEN = re.compile(rf"{re.escape(manifest.TEMPORARY)}(?P<name>step_(?P<step>\d{{8,}}))-.+")
UNREADABLE = "unreadable-"  # prefix of a checkpoint that could not be read at a resume
LEAVE_S = 10.0  # time limit after a failure for a checkpoint already being written
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def new_work(folder: Path, step: int) -> Path:
    """A new folder to write the checkpoint of this step in. Raises OSError."""
    import tempfile

    prefix = f"{manifest.TEMPORARY}{manifest.folder_name(step)}-"
    return Path(tempfile.mkdtemp(dir=folder, prefix=prefix))


def cut_saves(folder: Path) -> list[int]:
    """Steps whose checkpoint is being written, or was when its process was killed. A complete one
    of the same step has replaced an older one, whose removal was cut."""
    found = [WRITTEN.fullmatch(path.name) for path in matching(folder, f"{manifest.TEMPORARY}*")]
    return sorted(
        {int(cut["step"]) for cut in found if cut and not os.path.exists(folder / cut["name"])}
    )


def publish(work: Path, final: Path) -> None:
    """Give a complete folder its name; it replaces a checkpoint of the same step. Raises
    OSError."""
    umask.use(work)
    # sync the files before the folder gets its final name
    sync(work)
    if not final.exists():
        work.rename(final)
        sync(final.parent)
        return
    # The same step after a resume. A process that is killed meanwhile leaves one of the two.
    _refuse_link(final)
    replaced = work
    if not _exchange(work, final):
        replaced = final.with_name(f"{manifest.REPLACED}{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        try:
            work.rename(final)
        except OSError:
            replaced.rename(final)
            raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the new one is saved; the next start tries again


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a process killed meanwhile leaves no
    partial folder with a checkpoint's name. Raises OSError."""
    _refuse_link(path)
    shutil.rmtree(_aside(path))


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, msg("core.manifest.link"))


def _aside(path: Path) -> Path:
    """The folder under the name of one that is being removed."""
    work = path.with_name(f"{manifest.TEMPORARY}{path.name}")
    shutil.rmtree(work, ignore_errors=True)
    return path.rename(work)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once; False where the file system or the C library
    cannot (renameat2, Linux 3.15 and glibc 2.28)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that may be intact; it does not count any more. Returns its new path.
    Raises OSError."""
    _refuse_link(path)
    kept = path.with_name(f"{UNREADABLE}{path.name}")
    shutil.rmtree(kept, ignore_errors=True)
    return path.rename(kept)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process had begun to write or remove, and what has been replaced."""
    for path in folder.glob(f"{manifest.TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{manifest.REPLACED}*"):
        if path.with_name(path.name.removeprefix(manifest.REPLACED)).exists():
            shutil.rmtree(path, ignore_errors=True)
