"""Arguments of an injected fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FaultContext:
    """Context of a fault. `device`: cpu or cuda."""

    run_folder: Path
    rank: int
    device: str
    device_batch_size: int
    seconds: float
    code: int
    above: int
    # records "injected" with the time; a fault that acts later than its phase calls it then
    tell: Callable[[], None]


def subclasses(kind: type[Any]) -> set[type[Any]]:
    """All subclasses, both Duet's and those of a user's file."""
    found = set(kind.__subclasses__())
    return found.union(*map(subclasses, found))
