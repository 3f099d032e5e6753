"""Time of torch.compile: the first start of a configuration, a second one with its kernels in the
cache, and one without compilation."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, Skipped, check
from benchmarks.gpu.machine import ROOT, kernels
from benchmarks.gpu.trainings import TINY, train

CONFIG = "configs/dual_gpu/conservative.py"
COLD, WARM, OFF = "first start", "second start", "compile=0"


def run(bench: Bench) -> dict[str, Any]:
    """Seconds from the command to the end of step 1, and milliseconds of step 1."""
    if bench.machine.no_compiler:
        raise Skipped(f"torch.compile lacks {bench.machine.no_compiler}")
    cache = bench.cache / "compile_stage"
    shutil.rmtree(cache, ignore_errors=True)
    env = kernels(cache)
    flags: dict[str, Any] = {"total_batch_size": 8 * 1536, "num_iterations": 4}
    flags |= {**TINY, "total_batch_size": 128} if bench.smoke else {}
    starts: dict[str, dict[str, float]] = {}
    # The first one would prepare the corpus and load torch from the disk.
    train(bench, "unmeasured", str(ROOT / CONFIG), env=env, **flags | {"compile": 0}).ok().remove()
    for name, switch in {COLD: 1, WARM: 1, OFF: 0}.items():
        flags["compile"] = switch
        try:
            one = train(bench, f"start{len(starts)}", str(ROOT / CONFIG), env=env, **flags).ok()
        except Failed as error:
            raise Failed(str(error), {"starts": starts, "checks": []}) from None
        starts[name] = {"first_step_s": one.first_step_s, "step_ms": one.steps[0]["step_ms"]}
        one.remove()
    shutil.rmtree(cache, ignore_errors=True)
    cold, warm = starts[COLD]["first_step_s"], starts[WARM]["first_step_s"]
    return {
        "starts": starts,
        "checks": [check("the cache is used", warm < cold, f"{cold:.1f} s, then {warm:.1f} s")],
    }
