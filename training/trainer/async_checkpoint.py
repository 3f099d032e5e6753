"""Asynchronous checkpoints: the training thread only copies the state; a second thread does the
rest.

At most one copy exists: a save waits while the previous one is being written. One failed save is a
warning; a second in a row stops the run, which would otherwise train on without a checkpoint.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from training.core import checkpoint_folder, heartbeat, inodes, log, manifest, units
from training.core.errors import DISK_FULL, Problem, RunStopped
from training.core.messages import msg
from training.host import env_vars
from training.trainer import checkpoint, host_copy
from training.trainer.checkpoint import TensorTree, TrainProgress

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

PHASE = "checkpoint"  # heartbeat phase
POLL_S = 0.1
SAY_AFTER_S = 2.0


class AsyncCheckpointer:
    """Writes the checkpoints of one run. `on_saved(step, path)` and `on_warning(code, text)` are
    called from the writing thread. `resume`: the command that continues the run. `discarded`:
    checkpoints later than the one that was resumed, which the first save removes; it keeps those
    that are also in `unreadable`, under another name."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        on_saved: Callable[[int, Path], None],
        on_warning: Callable[[str, str], None],
        resume: str = "",
        *,
        keep_best: bool = False,
        discarded: Iterable[Path] = (),
        unreadable: Iterable[Path] = (),
    ) -> None:
        self.folder, self.keep, self.resume = folder, keep, resume
        self.keep_best = keep_best
        self._on_saved, self._on_warning = on_saved, on_warning
        self._pieces = 0  # pieces written or read back so far
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._missed: int | None = None  # step of the last save if it failed
        self.lost: int | None = None  # step of the last failed save
        self._discarded, self._unreadable = set(discarded), set(unreadable)
        self._copy: TensorTree = {}  # its memory is reused by the next save
        self._pin = not env_vars.under_wsl()  # where a process may pin 0.5 to 2 GB in all

    def __enter__(self) -> AsyncCheckpointer:
        checkpoint_folder.remove_leftovers(self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish()
        elif self._thread is not None:
            self._thread.join(checkpoint_folder.LEAVE_S)

    def save(
        self, position: TrainProgress, state: TensorTree, facts: ManifestRecord, *, required: bool
    ) -> None:
        """Return when the state is copied; if `required` or after a failed save, when it is on
        disk.

        A full disk is first reported by `on_warning`, since the next save may succeed. Raises
        OSError if `required`, and RunStopped after two failures in a row.
        """
        self._finish()
        self._copy = self._copied(state)
        if torch.cuda.is_initialized():  # not in a CPU run: it would create a context
            torch.cuda.synchronize()  # the copies above are asynchronous
        self._thread = threading.Thread(
            target=self._write, args=(position, facts, required), name="checkpoint", daemon=True
        )
        self._thread.start()
        if required or self._missed is not None:
            self._finish()

    def _copied(self, state: TensorTree) -> TensorTree:
        """The state in host memory: pinned, unless the driver has refused that once."""
        if self._pin:
            try:
                copy: TensorTree = host_copy.copied(state, self._copy, pin=True)
                return copy
            except host_copy.NotPinned as error:
                reason = str(error)
            # What is pinned so far is given back: NCCL and the batches need pinned memory, too.
            self._pin, self._copy = False, {}
            if torch.cuda.is_initialized():
                host_copy.empty_cache()
            log.info(msg("trainer.checkpoint.not_pinned", error=reason))
        plain: TensorTree = host_copy.copied(state, self._copy, pin=False)
        return plain

    def _write(self, position: TrainProgress, facts: ManifestRecord, required: bool) -> None:
        try:
            path = checkpoint.save(self.folder, position, self._copy, facts, self._moved)
            self._missed = None
            self._on_saved(position.step, path)
            self._discarded.discard(path)  # replaced
            left = checkpoint.prune(
                path,
                self.keep,
                keep_best=self.keep_best,
                discarded=self._discarded,
                unreadable=self._unreadable - {path},
            )
            if left:
                self._on_warning("warning.checkpoint_not_pruned", left)
        except OSError as error:
            if "DUET_SUPERVISED" in os.environ and not self.folder.parent.exists():
                # the run directory was removed: the supervisor reports that and ends the run
                return
            before, self._missed, self.lost = self._missed, position.step, position.step
            if before is not None:
                self._error = self._stopped(before, position.step, error)
            elif required:
                self._error = error
            else:
                checks = "; ".join(self._checks(error))
                text = msg(
                    "trainer.checkpoint.not_saved",
                    step=position.step,
                    error=error,
                    room=self._room(error),
                    checks=checks,
                )
                self._on_warning("warning.checkpoint_not_saved", text)
        except BaseException as error:  # raised on the training thread
            self._error = error

    def _room(self, error: OSError) -> str:
        """On a full disk, space needed for a checkpoint and space available."""
        if error.errno not in DISK_FULL:
            return ""
        try:
            if inodes.exhausted(self.folder):
                return msg("trainer.checkpoint.no_inodes", folder=self.folder)
            free = units.size(shutil.disk_usage(self.folder).free)
        except OSError as unknown:
            free = unknown.strerror or msg("trainer.checkpoint.unknown_amount")
        return msg(
            "trainer.checkpoint.room",
            folder=self.folder,
            bytes=units.size(host_copy.size(self._copy)),
            free=free,
        )

    def _checks(self, error: OSError) -> list[str]:
        if error.errno not in DISK_FULL:
            return [f"findmnt -T {shlex.quote(str(self.folder))}", "sudo dmesg -T | tail -50"]
        folder, runs = (shlex.quote(str(path)) for path in (self.folder, self.folder.parent.parent))
        return [f"df -h {folder}; df -i {folder}", f"du -sh {runs}/* | sort -h"]

    def _stopped(self, before: int, step: int, error: OSError) -> RunStopped:
        """The exception that stops the run, with the newest checkpoint's step."""
        newest = manifest.newest(self.folder)
        what = msg(
            "trainer.checkpoint.two_not_saved",
            before=before,
            step=step,
            error=error,
            room=self._room(error),
        )
        wanted, again = self._wanted() if error.errno in DISK_FULL else ("", self.resume)
        stopped = (
            msg("trainer.checkpoint.stopped", step=step, saved=newest["step"])
            if newest
            else msg("trainer.checkpoint.stopped_without", step=step)
        )
        return RunStopped(
            Problem(
                "checkpoint.unwritable",
                what,
                wanted,
                [*self._checks(error), *([again] if self.resume else [])],
            ),
            stopped,
            error,
        )

    def _wanted(self) -> tuple[str, str]:
        """The room that the run needs, and the command that resumes it then."""
        checkpoints = units.plural(self.keep + self.keep_best + 1, "checkpoint")
        again = (
            msg("trainer.checkpoint.again_fewer", resume=self.resume, keep=self.keep - 1)
            if self.keep > 1
            else msg("trainer.checkpoint.again", resume=self.resume)
        )
        return msg("trainer.checkpoint.room_wanted", checkpoints=checkpoints), again

    def _moved(self) -> None:
        self._pieces += 1

    def _finish(self) -> None:
        """Wait for the current save. Raises its error."""
        if self._thread is not None:
            began, seen, logged = time.monotonic(), self._pieces, False
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if seen != self._pieces:  # progress on a slow disk is not a hang
                    seen = self._pieces
                    heartbeat.current.beat(PHASE)
                if not logged and time.monotonic() - began > SAY_AFTER_S:
                    logged = True
                    log.info(msg("trainer.checkpoint.waiting"))
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
