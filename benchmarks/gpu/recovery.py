"""Recovery from a real out-of-memory error: a rank takes the whole GPU above a batch size."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.bench import Bench, check
from benchmarks.gpu.trainings import Run, launch
from training.tasks.memory import gib
from training.trainer import memory_snapshot

MODEL = {"depth": 4, "max_seq_len": 256, "device_batch_size": 8, "total_batch_size": 4096}


def run(bench: Bench) -> dict[str, Any]:
    """The restart with a smaller batch, and the time that it has cost."""
    model = {"depth": 1, "max_seq_len": 32, "total_batch_size": 256} if bench.smoke else {}
    flags: dict[str, Any] = MODEL | model | {"num_iterations": 20, "save_every": 5, "retries": 2}
    flags["compile"] = 0  # a smaller batch would be compiled again
    one = launch(bench, "oom", ranks=1, inject="oom@rank=0,step=12,above=4", **flags).ok()
    restarts = [e for e in one.events if e["event"] == "restart"]
    recovered = [e["seconds"] for e in one.events if e["event"] == "recovered"]
    changes = [e["changes"].get("device_batch_size") for e in restarts]
    reserved = _reserved(one)
    kept = f"{gib(reserved)} reserved" if reserved else "no snapshot"
    return {
        "restarts": len(restarts),
        "changes": changes,
        "steps_lost": [e["steps_lost"] for e in restarts],
        "seconds_to_next_step": recovered,
        "reserved_bytes": reserved,
        "checks": [
            check("smaller batch", changes == [[8, 4]], f"device_batch_size {sizes(changes)}"),
            check("all steps are done", len(one.steps) == 20, f"{len(one.steps)} of 20 steps"),
            check("memory of the failure is kept", reserved > 0, kept),
        ],
    }


def _reserved(one: Run) -> int:
    """Bytes that torch's allocator had when it failed; 0 without a snapshot of it."""
    kept = one.folder.memory_snapshot(0)
    if not kept.exists():
        return 0
    return memory_snapshot.digest(pickle.loads(kept.read_bytes()), device=0)["reserved_bytes"]


def sizes(changes: Sequence[Sequence[int] | None]) -> str:
    """'8 → 4, 4 → 2'; 'unchanged' for a restart with the same batch."""
    return ", ".join("unchanged" if one is None else f"{one[0]} → {one[1]}" for one in changes)
