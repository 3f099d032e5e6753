"""The same training on the CPU, on one rank and on two with GPUs, and once more with a kill."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import Bench, check
from benchmarks.gpu.trainings import Run, shape, train

# fp32 and AdamW: Muon's products are bf16 on a GPU. Two orders of summation differ by less than
# this over these steps; a wrong gradient, batch or weight by more.
TOLERANCE = 2e-3  # of the loss
MODEL = {"depth": 4, "max_seq_len": 256, "device_batch_size": 8, "total_batch_size": 4096}


def run(bench: Bench) -> dict[str, Any]:
    """Loss curves of all runs, and how far they are from the CPU's."""
    steps = bench.size(40, 12)
    flags = shape(bench, MODEL) | {"num_iterations": steps, "save_every": steps // 4}
    flags |= {"precision": "fp32", "optimizer": "adamw", "compile": 0}
    # The checksums of a null GPU are what its memory contained: ranks may differ.
    flags |= {"inspect_every": 0 if bench.machine.null_gpu else 1}
    flags |= {"total_batch_size": 256} if bench.smoke else {}
    runs = {
        "CPU, 1 rank": train(bench, "cpu", **flags | {"device": "cpu"}).ok(),
        "GPU, 1 rank": train(bench, "one", **flags).ok(),
        "GPU, 2 ranks": train(bench, "two", ranks=2, **flags).ok(),
    }
    killed, runs["GPU, 2 ranks, killed and resumed"] = _killed(bench, steps, flags)
    curves = {name: one.losses for name, one in runs.items()}
    cpu, _, two, resumed = curves.values()
    apart = {name: _apart(cpu, curve) for name, curve in curves.items()}
    limit = f"(limit {100 * TOLERANCE:g} %)"
    checks = [
        check(name, apart[name] <= TOLERANCE, f"{100 * apart[name]:.4f} % from the CPU's {limit}")
        for name in list(curves)[1:]
    ]
    # inspect_every=1: a run whose replicas differ ends with an error.
    checks.append(check("replicas are equal", True, f"compared after each of {steps} steps"))
    same = "bit for bit" if resumed == two else f"{100 * _apart(two, resumed):.4f} % apart"
    checks.append(
        check(
            "a killed run resumes",
            killed.code != 0 and len(resumed) == steps and _apart(two, resumed) <= TOLERANCE,
            f"exit status {killed.code}; losses against the run without a kill: {same}",
        )
    )
    return {
        "curves": curves,
        "relative_difference": apart,
        "resumed_is_identical": resumed == two,
        "ranks_share_a_gpu": len(bench.machine.gpus) < 2,
        "checks": checks,
    }


def _killed(bench: Bench, steps: int, flags: dict[str, Any]) -> tuple[Run, Run]:
    """A rank is killed in the last quarter, then the other one, and the run is resumed: both."""
    fault = f"kill@rank=1,step={steps - steps // 8}"
    killed = train(bench, "killed", ranks=2, **flags | {"inject": fault})
    again = flags | {"inject": "", "resume": "killed"}
    return killed, train(bench, "killed", ranks=2, **again).ok()


def _apart(curve: list[float], other: list[float]) -> float:
    """Largest relative difference of two curves; infinite if one is shorter."""
    if len(curve) != len(other):
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(curve, other, strict=True))
