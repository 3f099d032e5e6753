"""What Duet adds to a step on the host: a model so small that the GPU waits for the host."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, check
from benchmarks.gpu.trainings import WARM_UP, arguments, first_gpu, train

MODEL = {"depth": 2, "max_seq_len": 64, "device_batch_size": 1, "total_batch_size": 64}
ADDED_MS = 0.3  # the goal on a CPU


def run(bench: Bench) -> dict[str, Any]:
    """Milliseconds per step, and calls of CUDA in a step, eager and compiled. Both have AdamW:
    torch's Muon launches hundreds of kernels more than Duet's, which would hide what Duet adds."""
    found: dict[str, Any] = {}
    lacks = bench.machine.no_compiler
    notes = [f"not measured compiled: torch.compile lacks {lacks}"] if lacks else []
    try:
        for compiled in (0,) if lacks else bench.size((0, 1), (0,)):
            _compare(bench, compiled, found.setdefault("compiled" if compiled else "eager", {}))
    except Failed as error:
        measured = {name: row for name, row in found.items() if row}
        raise Failed(str(error), {"loops": measured, "notes": notes, "checks": []}) from None
    if not found["eager"]["duet_calls"] or not found["eager"]["bare_calls"]:
        notes.append("launches not measured: the profiler reports no CUDA calls on this machine")
    added = {name: row["duet_ms"] - row["bare_ms"] for name, row in found.items()}
    text = ", ".join(f"{name} {ms:+.2f} ms" for name, ms in added.items())
    return {
        "loops": found,
        "added_ms": added,
        "notes": notes,
        "checks": [
            check(
                "host time added to a step",
                max(added.values()) <= ADDED_MS,
                f"{text} (goal {ADDED_MS})",
            )
        ],
    }


def _compare(bench: Bench, compiled: int, found: dict[str, Any]) -> None:
    """`found` has the rounds measured so far."""
    steps, rounds = bench.size(300, 8) + WARM_UP, bench.size(3, 1)
    flags: dict[str, Any] = MODEL | {"compile": compiled, "optimizer": "adamw"}
    flags["num_iterations"] = steps
    job = {"depth": 2, "sequences": 1, "seq_len": 64, "vocab": 320, "blocks": 0, "chunks": 1}
    job |= {"selective": 0, "muon": False, "compiled": bool(compiled), "count": True}
    job |= {"steps": steps - WARM_UP, "warm_up": WARM_UP}
    duet, bare = [], []
    for number in range(rounds):
        one = train(bench, f"duet{compiled}{number}", **flags).ok()
        job["precision"] = one.plan["precision"]["value"]
        bare.append(bench.result("bare_loop", f"bare{compiled}{number}", job))
        duet.append(one.step_ms())
        one.remove()
        found["duet_ms"] = statistics.median(duet)
        found["bare_ms"] = statistics.median(b["step_ms"] for b in bare)
    found["bare_calls"] = bare[0].get("calls")
    found["duet_calls"] = _counted(bench, f"counted{compiled}", flags)


def _counted(bench: Bench, name: str, flags: dict[str, Any]) -> dict[str, float] | None:
    """CUDA calls of one of Duet's steps, in a run of its own: the profiler takes time."""
    job = {"flags": arguments(bench, name, flags)}
    found = bench.result("counted_rank", f"{name}_rank", job, **first_gpu(bench.machine))
    calls: dict[str, float] | None = found["calls"]
    return calls
