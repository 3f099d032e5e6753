"""Checkpoints that survive a crash at any instant and are verified when written and when read.

    checkpoints/step_00000200/state.pt       weights, optimizer
                              manifest.json  step, position in the data, sha256 and size of state.pt and of itself

Written into a temporary folder, fsynced, read back, renamed: a folder named step_* is whole. A flipped bit is noticed by the
checksum, and the checkpoint before is used.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from training.engine import manifest
from training.errors import Problem, UserError

TEMPORARY = ".writing-"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Position:
    """Where training stands: `step` optimizer steps done; in `epoch` (0-based) all ranks together have used the first `used`
    sequences of its order. Nothing of it depends on the number of ranks."""

    step: int = 0
    epoch: int = 0
    used: int = 0


@dataclass
class Loaded:
    position: Position
    state: dict[str, Any]
    manifest: dict[str, Any]
    path: Path
    skipped: list[str]  # damaged newer checkpoints, with what is wrong


class _Hashed(io.RawIOBase):
    """What is written through it, counted and hashed on its way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)


def save(folder: Path, position: Position, state: dict[str, Any], facts: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint and, when it reads back as written, remove the oldest ones.

    Raises OSError; the earlier checkpoints are then untouched.
    """
    final = folder / manifest.folder_name(position.step)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=TEMPORARY))
    try:
        with (work / "state.pt").open("wb") as file:
            hashed = _Hashed(file)
            torch.save(state, hashed)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the check shall read the disk, not the cache
        checksum = hashed.digest.hexdigest()
        manifest.write(work, {**asdict(position), **facts, "bytes": hashed.bytes, "sha256": checksum})
        if _sha256(work / "state.pt") != checksum:
            raise OSError(f"the disk does not give back what was written to {work / 'state.pt'}")
        os.chmod(work, 0o755)
        if final.exists():  # the same step after a resume
            shutil.rmtree(final)
        work.rename(final)
        _sync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    # Later ones are of a past that was given up: damaged, or before a resume from an older one.
    before, later = ([p for p in manifest.all_in(folder) if p != final and (p < final) == earlier] for earlier in (True, False))
    for old in [*before[: len(before) - keep + 1], *later]:
        shutil.rmtree(old)
    return final


def remove_leftovers(folder: Path) -> None:
    """What a killed process had begun to write."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    Raises UserError when there are checkpoints but every one is damaged: starting over would hide the loss.
    """
    skipped: list[str] = []
    for path in reversed(manifest.all_in(folder)):
        facts, wrong = manifest.read(path)
        wrong = wrong or _wrong(path / "state.pt", facts or {})
        if wrong or facts is None:
            skipped.append(f"{path.name}: {wrong}")
            continue
        position = Position(facts["step"], facts["epoch"], facts["used"])
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        return Loaded(position, state, facts, path, skipped)
    if skipped:
        raise UserError(Problem(f"every checkpoint in {folder} is damaged: {'; '.join(skipped)}", "a run with a whole checkpoint"))
    return None


def _wrong(state: Path, facts: dict[str, Any]) -> str:
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
