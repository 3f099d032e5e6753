"""Snapshot of a GPU's memory at the moment it was exhausted, kept with the failure.

torch's allocator knows size and place of every block at no cost; the snapshot is taken when an
allocation fails, before the exception releases anything. Who allocated a block is recorded only
with --debug: the stacks double the time of an allocation (docs/memory.md).

torch is imported late: the report of an error must not load it.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.core import rundir

if TYPE_CHECKING:
    from training.core.contracts.verdict import ExhaustedMemoryRecord

HISTORY = 100_000  # allocations and releases with their stacks, with --debug
LARGEST = 5  # sizes
LARGE = 1 << 20  # bytes: blocks that the digest names

# device, requested bytes, and the state of the allocator when an allocation failed last
_seen: tuple[int, int, Mapping[str, Any]] | None = None


def watch(*, stacks: bool) -> None:
    """Take a snapshot whenever an allocation on a GPU fails. `stacks`: record who allocates."""
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return  # another allocator of the user has neither snapshot nor history
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_failed)
    if stacks:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)


def _failed(device: int, requested: int, total: int, free: int) -> None:
    import torch

    global _seen
    _seen = device, requested, torch.cuda.memory._snapshot()


def keep(run: rundir.RunDir, rank: int, error: BaseException) -> ExhaustedMemoryRecord | None:
    """Write the snapshot of the allocation that failed with `error`; None if it is another error or
    none was taken. Raises OSError."""
    if _seen is None or type(error).__name__ != "OutOfMemoryError":
        return None
    device, requested, snapshot = _seen
    path = run.memory_snapshot(rank)
    rundir.write_bytes(path, pickle.dumps(snapshot))
    return {"file": str(path), "requested_bytes": requested, **digest(snapshot, device)}


def digest(snapshot: Mapping[str, Any], device: int) -> ExhaustedMemoryRecord:
    """Allocated and reserved bytes of a GPU, and its largest blocks by size."""
    segments = [s for s in snapshot["segments"] if s["device"] == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [b["size"] for b in blocks if b["state"] != "inactive"]
    free = [b["size"] for b in blocks if b["state"] == "inactive"]
    sizes = Counter(size for size in used if size >= LARGE)
    largest = sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:LARGEST]
    return {
        "allocated_bytes": sum(used),
        "reserved_bytes": sum(s["total_size"] for s in segments),
        "largest_free_bytes": max(free, default=0),
        "largest": [{"bytes": size, "count": count} for size, count in largest],
    }
