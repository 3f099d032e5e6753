"""Peak memory of a step in fresh processes against the formula of the plan: plain, with
recomputation, with a large vocabulary and with its loss in parts, eager and compiled."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, check
from training.tasks.gpt.memory import StepWorkload, estimate

LIMIT = 0.03  # of the peak, as on null GPUs (benchmarks.gpu_memory)
# configs/dual_gpu/conservative.py on one rank
BASE = StepWorkload(12, 8, 1536, 320, bf16=True, compiled=False, total_tokens=2 * 8 * 1536)
WAYS: dict[str, dict[str, int]] = {
    "plain": {},
    "8 blocks recomputed": {"blocks": 8},
    "vocabulary 32768": {"vocab": 32768},
    "loss in 8 parts": {"vocab": 32768, "chunks": 8},
}


def run(bench: Bench) -> dict[str, Any]:
    """Bytes without the CUDA context, for each way that fits into the GPU."""
    base = replace(BASE, depth=1, sequences=2, seq_len=32) if bench.smoke else BASE
    base = replace(base, fp16=not bench.machine.bf16)
    rows: dict[str, dict[str, int]] = {}
    notes, failed = [], 0
    lacks = bench.machine.no_compiler
    if lacks:
        notes.append(f"not measured compiled: torch.compile lacks {lacks}")
    for compiled in (False,) if lacks else bench.size((False, True), (False,)):
        for name, change in list(WAYS.items())[: bench.size(len(WAYS), 1)]:
            title = f"{name}, {'compiled' if compiled else 'eager'}"
            load = replace(base, compiled=compiled, **change)  # type: ignore[arg-type]  # numbers only
            formula = estimate(load)
            if formula.needed > bench.machine.gpus[0]["memory_bytes"]:
                notes.append(f"{title}: does not fit")
                continue
            try:
                peak = bench.result("peaks", title.replace(" ", "_"), asdict(load))["peak_bytes"]
            except Failed as error:
                if bench.left_s <= 0:
                    found = {"rows": rows, "notes": notes, "checks": []}
                    raise Failed(str(error), found) from None
                notes.append(f"{title}: {error}")
                failed += 1
                continue
            rows[title] = {"estimate_bytes": formula.total - formula.context, "peak_bytes": peak}
    if not rows:
        raise Failed("\n".join(notes))
    off = {name: row["estimate_bytes"] / row["peak_bytes"] - 1 for name, row in rows.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    text = f"largest error {100 * off[worst]:+.1f} % ({worst}; limit {100 * LIMIT:.0f} %)"
    text += f", {failed} of {len(rows) + failed} failed" if failed else ""
    checks = [check("the formula of the plan", abs(off[worst]) <= LIMIT and not failed, text)]
    return {"rows": rows, "notes": notes, "checks": checks}


if __name__ == "__main__":
    from benchmarks.memory import real_peak

    print(json.dumps({"peak_bytes": real_peak(StepWorkload(**json.loads(sys.argv[1])))}))
