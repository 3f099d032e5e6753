"""What a fault is told when it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FaultContext:
    """Where a fault happens. `device` is cpu or cuda."""

    run_folder: Path
    rank: int
    device: str
    device_batch_size: int
    seconds: float
    code: int
    above: int
    # notes 'injected' with the time; a fault without `tells` calls it when it really happens
    tell: Callable[[], None]


def subclasses(kind: type[Any]) -> set[type[Any]]:
    """All below it, of the product and of a user's own file."""
    found = set(kind.__subclasses__())
    return found.union(*map(subclasses, found))
