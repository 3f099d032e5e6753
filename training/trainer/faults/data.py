"""Faults in data and resources: the rank continues."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from pathlib import Path
from typing import Any

from training.trainer.faults.context import FaultContext, subclasses

# ---- the rank continues with wrong data


def nan(here: FaultContext) -> None:
    """The next loss of any task is NaN, and so are its gradients."""
    from training.tasks.base import Task

    real = {kind: vars(kind)["loss"] for kind in subclasses(Task) if "loss" in vars(kind)}

    def no_number(loss: Any) -> Any:
        def once(self: Any, model: Any, batch: Any) -> Any:
            for kind, own in real.items():
                kind.loss = own
            return loss(self, model, batch) * float("nan")

        return once

    for kind, own in real.items():
        kind.loss = no_number(own)


def empty(here: FaultContext) -> None:
    from training.data import token_dataset
    from training.tasks import base

    pair, moved = token_dataset.pair, base.moved

    def restored() -> None:
        token_dataset.pair, base.moved = pair, moved

    def no_pair(rows: Any) -> Any:
        restored()
        return pair(rows[:0])

    def none_moved(batch: Any, device: Any) -> Any:
        restored()
        return base.mapped(moved(batch, device), lambda tensor: tensor[:0])

    token_dataset.pair, base.moved = no_pair, none_moved


def no_data(here: FaultContext) -> None:
    from training.data.batch_dataset import BatchDataset

    for kind in subclasses(BatchDataset):
        kind.__len__ = lambda self: 0


# ---- resources


def slow(here: FaultContext) -> None:
    time.sleep(here.seconds)


def slow_disk(here: FaultContext) -> None:
    real = os.fsync

    def slow_fsync(file: Any) -> None:
        time.sleep(here.seconds)
        real(file)

    os.fsync = slow_fsync  # type: ignore[assignment]


def enospc(here: FaultContext) -> None:
    from training.trainer import checkpoint

    real = checkpoint._Hashed.write

    def full(self: Any, data: Any) -> int:
        checkpoint._Hashed.write = real  # type: ignore[method-assign]
        here.tell()
        self.failed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise self.failed

    checkpoint._Hashed.write = full  # type: ignore[method-assign]


def corrupt(here: FaultContext) -> None:
    from training.trainer import checkpoint

    real = checkpoint.save

    def save(*args: Any, **kwargs: Any) -> Path:
        checkpoint.save = real
        folder = real(*args, **kwargs)
        with (folder / "state.pt").open("r+b") as file:
            file.seek(os.fstat(file.fileno()).st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        here.tell()
        return folder

    checkpoint.save = save


def files(here: FaultContext) -> None:
    last = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def wandb_hang(here: FaultContext) -> None:
    import wandb

    real = wandb.init

    def init(*args: Any, **kwargs: Any) -> Any:
        here.tell()
        time.sleep(here.seconds)
        return real(*args, **kwargs)

    wandb.init = init
