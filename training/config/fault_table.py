"""Table of injectable faults: description, phase and keys. training.trainer.faults implements
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.core.heartbeat import STEP_PHASES
from training.core.messages import msg
from training.core.phases import BUILDING

# Ranks on which a fault can happen: rank 0, which alone writes and logs; any.
MAIN, ANY = (
    "main",
    "any",
)
CREATING, SAVING = "creating data iterator", "checkpoint"


@dataclass(frozen=True)
class Fault:
    """`keys`: its own keys with their defaults; `phase`: where it happens by default;
    `with_workers`: it has no effect without data-loader workers."""

    name: str
    text: str
    phase: str = "forward"
    ranks: str = ANY
    worker: bool = False  # happens in a data-loader worker of the rank
    with_workers: bool = False
    tells: bool = True  # recorded just before it happens; else it records itself
    keys: Mapping[str, Any] = field(default_factory=dict)


_FAULTS = (
    Fault("nan", msg("config.fault.nan")),
    Fault("empty", msg("config.fault.empty"), "fetch"),
    Fault("no_data", msg("config.fault.no_data"), CREATING),
    Fault("slow", msg("config.fault.slow"), keys={"seconds": 8.0}),
    Fault(
        "slow_disk",
        msg("config.fault.slow_disk"),
        BUILDING,
        ranks=MAIN,
        keys={"seconds": 8.0},
    ),
    Fault("enospc", msg("config.fault.enospc"), SAVING, ranks=MAIN, tells=False),
    Fault(
        "corrupt",
        msg("config.fault.corrupt"),
        SAVING,
        ranks=MAIN,
        tells=False,
    ),
    Fault(
        "files",
        msg("config.fault.files"),
        CREATING,
        with_workers=True,
    ),
    Fault(
        "wandb_hang",
        msg("config.fault.wandb_hang"),
        BUILDING,
        ranks=MAIN,
        tells=False,
        keys={"seconds": 3600.0},
    ),
    Fault("sleep", msg("config.fault.sleep")),
    Fault(
        "lock_tqdm",
        msg("config.fault.lock_tqdm"),
        ranks=MAIN,
    ),
    Fault(
        "gil",
        msg("config.fault.gil"),
    ),
    Fault("loop", msg("config.fault.loop")),
    Fault("stop", msg("config.fault.stop")),
    Fault(
        "io",
        msg("config.fault.io"),
    ),
    Fault("desync", msg("config.fault.desync")),
    Fault("desync_shape", msg("config.fault.desync_shape")),
    Fault("kill", msg("config.fault.kill")),
    Fault("segv", msg("config.fault.segv")),
    Fault("abort", msg("config.fault.abort")),
    Fault("exit", msg("config.fault.exit"), keys={"code": 0}),
    Fault("raise", msg("config.fault.raise")),
    Fault("ecc", msg("config.fault.ecc")),
    Fault(
        "oom",
        msg("config.fault.oom"),
        keys={"above": 0},
    ),
    Fault(
        "worker_stuck",
        msg("config.fault.worker_stuck"),
        worker=True,
    ),
    Fault("worker_kill", msg("config.fault.worker_kill"), worker=True),
    Fault("worker_raise", msg("config.fault.worker_raise"), worker=True),
    Fault("worker_bus", msg("config.fault.worker_bus"), worker=True),
)
TABLE: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}


def table(step: int) -> str:
    """All faults as a text table, with the place of each by default. `step`: of those that happen
    in one."""
    width = max(map(len, TABLE))
    lines = []
    for name, one in TABLE.items():
        extra = "".join(
            f"; {key} ({value:g})" if key != "above" else f"; {key}"
            for key, value in one.keys.items()
        )
        where = _place(one, step)
        if one.ranks == MAIN:
            where = f"{msg('config.fault.rank_0_only')}; {where}"
        lines.append(f"  {name:<{width}}  {one.text}{extra} [{where}]")
    return "\n".join(lines)


def _place(one: Fault, step: int) -> str:
    if one.worker:
        return msg("config.fault.in_worker")
    if one.phase in STEP_PHASES:
        return msg("config.fault.in_step", step=step, phase=one.phase)
    return one.phase
