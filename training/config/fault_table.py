"""The table of faults: what each one is, where it happens and what may be said of it. What it does
is training.trainer.faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ranks that a fault makes sense on: rank 0, which alone writes and speaks; any
MAIN, ANY = (
    "main",
    "any",
)
CREATING, BUILDING, SAVING = "creating data iterator", "building the model", "checkpoint"


@dataclass(frozen=True)
class Fault:
    """`keys` beyond those that every fault has, with their defaults; `phase`: where it happens when
    nothing else is asked for."""

    name: str
    text: str
    phase: str = "forward"
    ranks: str = ANY
    worker: bool = False  # happens in a data-loader worker of the rank
    tells: bool = True  # noted just before it happens; else it notes itself when it really does
    keys: Mapping[str, Any] = field(default_factory=dict)


_FAULTS = (
    Fault("nan", "the loss of its next micro-batch is NaN"),
    Fault("empty", "its next micro-batch has no sequences", "fetch"),
    Fault("no_data", "its dataset has no sequences at all", CREATING),
    Fault("slow", "pauses for `seconds`, then goes on: no failure", keys={"seconds": 8.0}),
    Fault(
        "slow_disk",
        "from now on every fsync takes `seconds` longer: no failure",
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
        "all file descriptors are in use, as after a leak: nothing can be opened any more",
        CREATING,
    ),
    Fault(
        "wandb_hang",
        "starting W&B takes `seconds` (an hour): its thread only, no failure",
        BUILDING,
        ranks=MAIN,
        tells=False,
        keys={"seconds": 3600.0},
    ),
    Fault("sleep", "waits for ever for a lock that it holds itself"),
    Fault(
        "lock_tqdm",
        "another thread takes tqdm's lock for ever: the progress bar and its lines block",
        ranks=MAIN,
    ),
    Fault(
        "gil",
        "blocks in C and keeps Python's global lock: none of the rank's threads runs any more",
    ),
    Fault("loop", "endless loop in Python"),
    Fault("stop", "SIGSTOP to itself"),
    Fault(
        "io",
        "blocks in the kernel without being interruptible (state D), as on a dead network disk",
    ),
    Fault("desync", "asks for a collective that no other rank asks for (a broadcast)"),
    Fault("desync_shape", "asks for one all_reduce more than the others, of a shape of its own"),
    Fault("kill", "SIGKILL to itself"),
    Fault("segv", "reads at address 0 (SIGSEGV)"),
    Fault("abort", "aborts (SIGABRT), as a failed assertion in C does"),
    Fault("exit", "leaves with status `code` in the middle of the training", keys={"code": 0}),
    Fault("raise", "raises ValueError"),
    Fault(
        "oom",
        "GPU out of memory, as long as device_batch_size is over `above`; on a CPU the same "
        "exception with CUDA's text",
        keys={"above": 0},
    ),
    Fault(
        "worker_stuck",
        "a data-loader worker waits for ever for a lock that it holds itself",
        worker=True,
    ),
    Fault("worker_kill", "SIGKILL to a data-loader worker", worker=True),
    Fault("worker_raise", "a data-loader worker raises ValueError", worker=True),
    Fault("worker_bus", "SIGBUS to a data-loader worker, as when /dev/shm is full", worker=True),
)
TABLE: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}


def table() -> str:
    """All faults, for people."""
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
