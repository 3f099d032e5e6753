"""Checkpoints off the step path: a copy of the state on the training thread, everything else on one thread of its own.

At most one copy lives: a save that comes while the one before is still being written waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from training import console, heartbeat
from training.engine import checkpoint
from training.engine.checkpoint import Position

PHASE = "checkpoint"  # of the heartbeat
POLL_S = 0.1
SAY_AFTER_S = 2.0
LEAVE_S = 10.0  # after a failure: as long may the last checkpoint take that was begun before it

State = dict[str, Any]


class Saver:
    """Writes the checkpoints of one run. `on_saved(step, path)` and `on_warning(text)` are called from the writing thread."""

    def __init__(self, folder: Path, keep: int, on_saved: Callable[[int, Path], None], on_warning: Callable[[str], None]) -> None:
        self.folder, self.keep = folder, keep
        self._on_saved, self._on_warning = on_saved, on_warning
        self._pieces = 0  # written or read back so far
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copy: State = {}  # its memory is used again by the next save

    def __enter__(self) -> Saver:
        checkpoint.remove_leftovers(self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        elif self._thread is not None:
            self._thread.join(LEAVE_S)

    def save(self, position: Position, state: State, facts: dict[str, Any], *, required: bool) -> None:
        """Returns when the state is copied; when `required`, after it is on the disk.

        A full disk does not end the training, the next save may succeed: `on_warning` tells it. Raises OSError when `required`.
        """
        self._finish()
        self._copy = _copied(state, self._copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies above are asynchronous
        self._thread = threading.Thread(target=self._write, args=(position, facts, required), name="checkpoint", daemon=True)
        self._thread.start()
        if required:
            self._finish()

    def _write(self, position: Position, facts: dict[str, Any], required: bool) -> None:
        try:
            path = checkpoint.save(self.folder, position, self._copy, facts, self._moved)
            self._on_saved(position.step, path)
            if left := checkpoint.prune(path, self.keep):
                self._on_warning(left)
        except OSError as error:
            if required:
                self._error = error
            else:
                self._on_warning(f"checkpoint of step {position.step} was not saved: {error}")
        except BaseException as error:  # raised on the training thread
            self._error = error

    def _moved(self) -> None:
        self._pieces += 1

    def _finish(self) -> None:
        """The save that is under way is over. Raises its error."""
        if self._thread is not None:
            began, seen, said = time.monotonic(), self._pieces, False
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if seen != self._pieces:  # a slow disk is no hang, one that takes nothing is
                    seen = self._pieces
                    heartbeat.current.beat(PHASE)
                if not said and time.monotonic() - began > SAY_AFTER_S:
                    said = True
                    console.info("waiting until the checkpoint is written")
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _copied(value: Any, buffer: Any) -> Any:
    """`value` with every tensor copied to host memory, into `buffer`'s tensors where they fit."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(buffer, torch.Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype
        target = buffer if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        return target.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        have = buffer if isinstance(buffer, dict) else {}
        return {key: _copied(item, have.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        old = buffer if isinstance(buffer, (list, tuple)) and len(buffer) == len(value) else [None] * len(value)
        return type(value)(_copied(item, there) for item, there in zip(value, old, strict=True))
    return value
