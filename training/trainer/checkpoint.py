"""Checkpoints that survive a crash at any time and are verified when written and when read.

    checkpoints/step_00000200/state.pt       weights, optimizer
                              manifest.json  step, position in the data, sha256 and size of state.pt
                                             and of itself

Written into a temporary folder, fsynced, read back, renamed: a folder named step_* is complete. A
flipped bit is detected by the checksum, and the previous checkpoint is used.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from training.core import checkpoint_folder, evaluations, manifest
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.tasks import torch_file, trained

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

# bytes between heartbeats: a large model written at once would exceed the hang timeout
SYNCED = 1 << 28
# Reads of a checkpoint that fails with an error of the disk or the network.
TRIES, BETWEEN_S = 3, 1.0

# accepted by torch.save(): tensors, numbers and strings in dicts and lists
TensorTree = dict[str, Any]


@dataclass(frozen=True)
class TrainProgress:
    """Position of the training: `step` optimizer steps done; in `epoch` (0-based) all ranks
    together have used the first `used` sequences of its order; `tokens` in total. Independent of
    the number of ranks."""

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
    skipped: list[str]  # newer checkpoints that are damaged or unreadable, each with its problem
    unreadable: Collection[Path] = ()  # of them: may be intact


class _Hashed(io.RawIOBase):
    """Counts and hashes everything written through it. `failed`: the disk's error, which torch
    hides."""

    def __init__(self, file: BinaryIO, moved: Callable[[], None]) -> None:
        self.file, self.moved, self.digest, self.bytes = file, moved, hashlib.sha256(), 0
        self.failed: OSError | None = None
        self._dirty = 0  # bytes that may not be on disk yet

    def write(self, data: Any) -> int:
        """A tensor arrives in one piece, however large it is."""
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
    """Write a checkpoint and read it back. `moved()` is called for each piece written or read.

    Raises OSError; then it leaves nothing behind, and earlier checkpoints are unchanged.
    """
    final = folder / manifest.folder_name(position.step)
    work = checkpoint_folder.new_work(folder, position.step)
    try:
        with (work / manifest.STATE).open("wb") as file:
            hashed = _Hashed(file, moved)
            try:
                torch.save(state, hashed)
            except RuntimeError:  # raised by torch for any error in write()
                if hashed.failed:
                    raise hashed.failed from None
                raise
            file.flush()
            os.fsync(file.fileno())
            # verify the disk, not the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        checksum = hashed.digest.hexdigest()
        manifest.write(
            work, {**position.record(), **facts, "bytes": hashed.bytes, "sha256": checksum}
        )
        if manifest.sha256(work / manifest.STATE, moved) != checksum:
            raise OSError(msg("trainer.checkpoint.read_back", file=work / manifest.STATE))
        checkpoint_folder.publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def prune(
    newest: Path,
    keep: int,
    *,
    keep_best: bool = False,
    discarded: Collection[Path] = (),
    unreadable: Collection[Path] = (),
) -> str:
    """Keep the last `keep` checkpoints up to `newest` and, with `keep_best`, the one with the best
    evaluation. Remove older ones and those in `discarded`, which are damaged or from before a
    resume from an older one; other later ones are those of a process that has taken over. Those
    that are `unreadable` get another name. Returns what could not be removed, or ""."""
    try:
        found = manifest.listed(newest.parent)
    except OSError as error:
        return msg("trainer.checkpoint.not_removed", left=f"{newest.parent}: {error.strerror}")
    step = manifest.step_of(newest)
    valid = [p for p in found if manifest.step_of(p) <= step and p not in discarded]
    best = evaluations.best_checkpoint(valid) if keep_best else None
    out = {*valid[:-keep], *discarded} - ({best[0]} if best else set())
    left = []
    for old in found:
        if old not in out:
            continue
        try:
            if old in unreadable:
                checkpoint_folder.set_aside(old)
            else:
                checkpoint_folder.remove(old)
        except OSError as error:
            left.append(f"{old}: {error.strerror}")
    return msg("trainer.checkpoint.not_removed", left="; ".join(left)) if left else ""


def latest(folder: Path, moved: Callable[[], None] = lambda: None) -> LoadedCheckpoint | None:
    """The newest intact checkpoint, or None if there is none at all. `moved()` is called for each
    piece that is read.

    Raises UserError if there are checkpoints but all are damaged, or if they cannot be listed:
    starting over would hide the loss.
    """
    skipped: list[str] = []
    unreadable: list[Path] = []
    try:
        found = manifest.listed(folder)
    except OSError as error:
        what = msg("trainer.checkpoint.not_listed", folder=folder, strerror=error.strerror)
        wanted = msg("trainer.checkpoint.intact_wanted")
        raise UserError(Problem("checkpoint.damaged", what, wanted), Exit.RESOURCES) from error
    for path in reversed(found):
        facts, wrong, may_be_intact = _examined(path, moved)
        if may_be_intact:
            unreadable.append(path)
        if wrong or facts is None:
            skipped.append(f"{path.name}: {wrong}")
            continue
        position = TrainProgress(
            facts["step"], facts["epoch"], facts["used"], facts.get("tokens", 0)
        )
        try:
            state = _state(path / manifest.STATE)
        except pickle.UnpicklingError as error:
            unreadable.append(path)
            skipped.append(f"{path.name}: {error}")
            continue
        return LoadedCheckpoint(position, state, facts, path, skipped, unreadable)
    if skipped:
        raise UserError(
            Problem(
                "checkpoint.damaged",
                msg("trainer.checkpoint.all_damaged", folder=folder, skipped="; ".join(skipped)),
                msg("trainer.checkpoint.intact_wanted"),
            )
        )
    return None


def _state(file: Path) -> TensorTree:
    """Without that of an optimizer whose tensors are of a class that is no longer imported: the
    task has another optimizer by now. Raises UnpicklingError for objects of other classes."""
    try:
        state: TensorTree = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = trained.UNSAFE.search(str(error))
        if not unsafe:
            raise
        refused = pickle.UnpicklingError(msg("trainer.checkpoint.objects", name=unsafe[1]))
        try:
            state = {**torch_file.load(file, mapped=False), "optimizer": None}
        except (pickle.UnpicklingError, MemoryError, OSError):
            raise
        except Exception:  # of any type: an object that no tensor can replace
            raise refused from None
        if torch_file.has_stand_in(state):
            raise refused from None
    return state


def _examined(path: Path, moved: Callable[[], None]) -> tuple[ManifestRecord | None, str, bool]:
    """(manifest, what is wrong or "", whether the checkpoint may be intact all the same: its disk
    has returned an error)."""
    wrong = ""
    for number in range(TRIES):
        if number:
            moved()
            time.sleep(BETWEEN_S)
        try:
            with suppress(FileNotFoundError), (path / manifest.NAME).open("rb") as file:
                file.read()
            facts, wrong = manifest.read(path)
            state = path / manifest.STATE
            if facts:
                wrong = manifest.read_damage(state, facts["bytes"], facts["sha256"], moved)
            return facts, wrong, False
        except OSError as error:
            wrong = manifest.unreadable(path / manifest.STATE, error)
    return None, wrong, True
