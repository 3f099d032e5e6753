"""The table of faults: what each one is, and what it is told when it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN, ANY = "main", "any"  # ranks that a fault makes sense on: rank 0, which alone writes and speaks; any
CREATING, BUILDING, SAVING = "creating data iterator", "building the model", "checkpoint"


@dataclass(frozen=True)
class Here:
    """Where a fault happens. `device` is cpu or cuda."""

    run_folder: Path
    rank: int
    device: str
    device_batch_size: int
    seconds: float
    code: int
    above: int
    tell: Callable[[], None]  # notes 'injected' with the time; a fault without `tells` calls it when it really happens


@dataclass(frozen=True)
class Fault:
    """`keys` beyond those that every fault has; `phase`: where it happens when nothing else is asked for."""

    name: str
    act: Callable[[Here], object]
    phase: str
    keys: dict[str, Any]  # with their defaults
    ranks: str
    worker: bool  # happens in a data-loader worker of the rank
    tells: bool

    @property
    def text(self) -> str:
        return " ".join((self.act.__doc__ or "").split())


TABLE: dict[str, Fault] = {}


def fault(phase: str = "forward", *, ranks: str = ANY, worker: bool = False, tells: bool = True, **keys: Any) -> Callable[..., Any]:
    def add(act: Callable[[Here], object]) -> Callable[[Here], object]:
        name = act.__name__.rstrip("_")
        TABLE[name] = Fault(name, act, phase, keys, ranks, worker, tells)
        return act

    return add


def table() -> str:
    """All faults, for people."""
    width = max(map(len, TABLE))
    lines = []
    for name, one in TABLE.items():
        extra = "".join(f"; {key} ({value:g})" if key != "above" else f"; {key}" for key, value in one.keys.items())
        where = "rank 0 only" if one.ranks == MAIN else "worker" if one.worker else ""
        lines.append(f"  {name:<{width}}  {one.text}{extra}" + (f" [{where}]" if where else ""))
    return "\n".join(lines)
