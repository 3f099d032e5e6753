"""Table of injectable faults: description, phase and keys. training.trainer.faults implements
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Ranks on which a fault can happen: rank 0, which alone writes and logs; any.
MAIN, ANY = (
    "main",
    "any",
)
CREATING, BUILDING, SAVING = "creating data iterator", "building the model", "checkpoint"


@dataclass(frozen=True)
class Fault:
    """`keys`: its own keys with their defaults; `phase`: where it happens by default."""

    name: str
    text: str
    phase: str = "forward"
    ranks: str = ANY
    worker: bool = False  # happens in a data-loader worker of the rank
    tells: bool = True  # recorded just before it happens; else it records itself
    keys: Mapping[str, Any] = field(default_factory=dict)


_FAULTS = (
    Fault("nan", "the loss of its next micro-batch is NaN"),
    Fault("empty", "its next micro-batch has no sequences", "fetch"),
    Fault("no_data", "its dataset has no sequences at all", CREATING),
    Fault("slow", "pauses for `seconds`, then continues: no failure", keys={"seconds": 8.0}),
    Fault(
        "slow_disk",
        "every further fsync takes `seconds` longer: no failure",
        BUILDING,
        ranks=MAIN,
        keys={"seconds": 8.0},
    ),
    Fault("enospc", "the disk is full for the next checkpoint", SAVING, ranks=MAIN, tells=False),
    Fault(
        "corrupt",
        "one bit of the next checkpoint flips after it was saved",
        SAVING,
        ranks=MAIN,
        tells=False,
    ),
    Fault(
        "files",
        "all file descriptors are in use, as after a leak: no file can be opened",
        CREATING,
    ),
    Fault(
        "wandb_hang",
        "the start of W&B takes `seconds` (an hour) in its thread: no failure",
        BUILDING,
        ranks=MAIN,
        tells=False,
        keys={"seconds": 3600.0},
    ),
    Fault("sleep", "waits forever for a lock that it holds itself"),
    Fault(
        "lock_tqdm",
        "another thread holds the lock of tqdm forever: the progress bar blocks",
        ranks=MAIN,
    ),
    Fault(
        "gil",
        "blocks in C while holding the GIL: no thread of the rank can run",
    ),
    Fault("loop", "endless loop in Python"),
    Fault("stop", "SIGSTOP to itself"),
    Fault(
        "io",
        "blocks uninterruptibly in the kernel (state D), as on a dead network disk",
    ),
    Fault("desync", "calls a collective that no other rank calls (a broadcast)"),
    Fault("desync_shape", "calls one more all_reduce than the others, with a different shape"),
    Fault("kill", "SIGKILL to itself"),
    Fault("segv", "reads at address 0 (SIGSEGV)"),
    Fault("abort", "aborts (SIGABRT), as a failed assertion in C does"),
    Fault("exit", "exits with status `code` in the middle of the training", keys={"code": 0}),
    Fault("raise", "raises ValueError"),
    Fault(
        "oom",
        "GPU out of memory while device_batch_size is above `above`; on a CPU the same exception "
        "with the text of CUDA",
        keys={"above": 0},
    ),
    Fault(
        "worker_stuck",
        "a data-loader worker waits forever for a lock that it holds itself",
        worker=True,
    ),
    Fault("worker_kill", "SIGKILL to a data-loader worker", worker=True),
    Fault("worker_raise", "a data-loader worker raises ValueError", worker=True),
    Fault("worker_bus", "SIGBUS to a data-loader worker, as when /dev/shm is full", worker=True),
)
TABLE: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}


def table() -> str:
    """All faults as a text table."""
    width = max(map(len, TABLE))
    lines = []
    for name, one in TABLE.items():
        extra = "".join(
            f"; {key} ({value:g})" if key != "above" else f"; {key}"
            for key, value in one.keys.items()
        )
        where = "rank 0 only" if one.ranks == MAIN else "worker" if one.worker else ""
        lines.append(f"  {name:<{width}}  {one.text}{extra}" + (f" [{where}]" if where else ""))
    return "\n".join(lines)
