"""Checkpoints that survive a crash at any instant and are verified when written and when read.

    checkpoints/step_00000200/state.pt       weights, optimizer
                              manifest.json  step, position in the data, sha256 and size of state.pt
                                             and of itself

Written into a temporary folder, fsynced, read back, renamed: a folder named step_* is whole. A
flipped bit is noticed by the checksum, and the checkpoint before is used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from training.core import manifest
from training.core.errors import Problem, UserError

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

TEMPORARY = ".writing-"
CHUNK = 1 << 20
SYNCED = 1 << 28  # bytes between two heartbeats: a large model at once would be silent too long

# what torch.save() takes: tensors, numbers and texts in dicts and lists
TensorTree = dict[str, Any]


@dataclass(frozen=True)
class TrainProgress:
    """Where training stands: `step` optimizer steps done; in `epoch` (0-based) all ranks together
    have used the first `used` sequences of its order; `tokens` in all. Nothing of it depends on the
    number of ranks."""

    step: int = 0
    epoch: int = 0
    used: int = 0
    tokens: int = 0

    def record(self) -> ManifestRecord:
        return cast("ManifestRecord", asdict(self))


@dataclass
class LoadedCheckpoint:
    position: TrainProgress
    state: TensorTree
    manifest: ManifestRecord
    path: Path
    skipped: list[str]  # damaged newer checkpoints, with what is wrong


class _Hashed(io.RawIOBase):
    """What is written through it, counted and hashed on its way. `failed`: what the disk said,
    since torch hides it."""

    def __init__(self, file: BinaryIO, moved: Callable[[], None]) -> None:
        self.file, self.moved, self.digest, self.bytes = file, moved, hashlib.sha256(), 0
        self.failed: OSError | None = None
        self._dirty = 0  # bytes that the disk may not have yet

    def write(self, data: Any) -> int:
        """A tensor comes as one piece, however large it is."""
        with memoryview(data).cast("B") as view:
            for at in range(0, len(view), SYNCED):
                self._write(view[at : at + SYNCED])
            return len(view)

    def _write(self, part: memoryview) -> None:
        self.digest.update(part)
        self.bytes += len(part)
        self._dirty += len(part)
        self.moved()
        try:
            self.file.write(part)
            if self._dirty >= SYNCED:
                self._dirty = 0
                self.file.flush()
                os.fdatasync(self.file.fileno())
                self.moved()
        except OSError as error:
            self.failed = error
            raise


def save(
    folder: Path,
    position: TrainProgress,
    state: TensorTree,
    facts: ManifestRecord,
    moved: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint and read it back. `moved()` is called for each piece that is written or
    read.

    Raises OSError; then nothing of it is left, and the earlier checkpoints are untouched.
    """
    final = folder / manifest.folder_name(position.step)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=TEMPORARY))
    try:
        with (work / "state.pt").open("wb") as file:
            hashed = _Hashed(file, moved)
            try:
                torch.save(state, hashed)
            except RuntimeError:  # torch's own, whatever went wrong in write()
                if hashed.failed:
                    raise hashed.failed from None
                raise
            file.flush()
            os.fsync(file.fileno())
            # the check shall read the disk, not the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        checksum = hashed.digest.hexdigest()
        manifest.write(
            work, {**position.record(), **facts, "bytes": hashed.bytes, "sha256": checksum}
        )
        if _sha256(work / "state.pt", moved) != checksum:
            raise OSError(f"the disk does not give back what was written to {work / 'state.pt'}")
        os.chmod(work, 0o755)
        if final.exists():  # the same step after a resume
            _remove(final)
        # the files' names, before the folder gets the name that says it is whole
        _sync_folder(work)
        work.rename(final)
        _sync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def prune(newest: Path, keep: int) -> str:
    """Remove what is older than the `keep` last ones up to `newest`, and everything later: that is
    of a past that was given up, damaged or before a resume from an older one. Returns what could
    not be removed, for people, or nothing."""
    found = manifest.all_in(newest.parent)
    at = found.index(newest)
    left = []
    for old in [*found[: max(0, at - keep + 1)], *found[at + 1 :]]:
        try:
            _remove(old)
        except OSError as error:
            left.append(f"{old}: {error.strerror}")
    return f"old checkpoints can not be removed: {'; '.join(left)}" if left else ""


def _remove(path: Path) -> None:
    """Its name goes first, at once: a process that is killed meanwhile leaves nothing half that is
    named like a checkpoint."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link")
    work = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(work, ignore_errors=True)
    path.rename(work)
    shutil.rmtree(work)


def remove_leftovers(folder: Path) -> None:
    """What a killed process had begun to write or to remove."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path, moved: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            moved()
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(folder: Path) -> LoadedCheckpoint | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    Raises UserError when there are checkpoints but every one is damaged: starting over would hide
    the loss.
    """
    skipped: list[str] = []
    for path in reversed(manifest.all_in(folder)):
        facts, wrong = manifest.read(path)
        wrong = wrong or _wrong(path / "state.pt", facts or {})
        if wrong or facts is None:
            skipped.append(f"{path.name}: {wrong}")
            continue
        position = TrainProgress(
            facts["step"], facts["epoch"], facts["used"], facts.get("tokens", 0)
        )
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        return LoadedCheckpoint(position, state, facts, path, skipped)
    if skipped:
        raise UserError(
            Problem(
                "checkpoint.damaged",
                f"every checkpoint in {folder} is damaged: {'; '.join(skipped)}",
                "a run with a whole checkpoint",
            )
        )
    return None


def _wrong(state: Path, facts: ManifestRecord) -> str:
    """What is wrong with the state of a checkpoint, or nothing."""
    try:
        size = state.stat().st_size
        if size != facts["bytes"]:
            return f"state.pt has {size} of {facts['bytes']} bytes"
        if _sha256(state) != facts["sha256"]:
            return "state.pt does not match its checksum (a flipped bit?)"
    except OSError as error:
        return f"state.pt can not be read: {error.strerror}"
    return ""
