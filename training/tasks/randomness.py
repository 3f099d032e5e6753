"""Random numbers of a task: torch's, numpy's and Python's, since a user's task may draw from any of
them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """All generators of this process start from `value`, also of a GPU that is used later."""
    torch.manual_seed(value)
    reseed(value)


def reseed(value: int) -> None:
    """The same in a step, for the devices in use: torch.manual_seed formats a stack for each
    backend that it finds unused, 0.1 ms in all."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # its largest seed


@dataclass(frozen=True)
class RandomState:
    """What the generators on the CPU return next."""

    torch: torch.Tensor
    python: Any
    numpy: Any


def state() -> RandomState:
    return RandomState(torch.get_rng_state(), random.getstate(), np.random.get_state())


def restore(before: RandomState) -> None:
    torch.set_rng_state(before.torch)
    random.setstate(before.python)
    np.random.set_state(before.numpy)


@contextmanager
def apart() -> Iterator[None]:
    """What is seeded and drawn inside leaves the caller's random numbers as they were."""
    before = state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            restore(before)
