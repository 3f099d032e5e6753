"""`--check`: the plan and the resource report as `--dry_run` shows them, and the memory of a step measured by fake tensors.

Writes and launches nothing. Imports torch, in this process: the interpreter is the run's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from training import console
from training.errors import Exit
from training.host import preflight
from training.host.memory import Estimate, Load, estimate, gib


@dataclass(frozen=True)
class Measured:
    """Bytes of an eager step without the GPU's context: by fake tensors, and by the formula for the same."""

    fake: int
    formula: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.fake / self.formula


def measure(load: Load) -> Measured:
    """Raises training.engine.measure.Unavailable when this torch can not."""
    started = time.perf_counter()
    from training.engine.measure import peak

    fake = peak(load)
    same = estimate(replace(load, compiled=False, cuda=False))
    return Measured(fake, same.total, time.perf_counter() - started)


def memory(load: Load, room: int | None) -> tuple[list[str], bool]:
    """The report of the memory, and whether the run fits."""
    from training.engine.measure import Unavailable

    planned = estimate(load)
    how = f"{'compiled' if load.compiled else 'eager'}, {'bf16' if load.bf16 else 'fp32'}"
    lines = [f"formula ({how}, with what the plan chose)   {gib(planned.total)}"]
    try:
        seen = measure(load)
    except Unavailable as error:
        lines.append(f"fake tensors: not measured. {error}")
        return [*lines, verdict(planned.total, room)], fits(planned.total, room)
    lines += [
        f"formula (eager, CPU autocast, no GPU context)   {gib(seen.formula)}",
        f"fake tensors (the same step)   {gib(seen.fake)}: {seen.ratio:.2f} × the formula, in {seen.seconds:.1f} s",
        "fake tensors see neither torch.compile nor a GPU's own kernels; depth is extrapolated from one to three blocks of the real width",
    ]
    # Where the formula is low for the step that can be measured, it is low for the planned one too.
    worst = int(planned.total * max(1.0, seen.ratio))
    return [*lines, verdict(worst, room)], fits(worst, room)


def _with_margin(total: int) -> Estimate:
    return Estimate(total, 0, 0, 0, 0, 0, 0, 0)


def fits(total: int, room: int | None) -> bool:
    return room is None or _with_margin(total).needed <= room


def verdict(total: int, room: int | None) -> str:
    margin = _with_margin(total)
    if room is None:
        return f"verdict: unknown, {gib(margin.needed)} needed, the free memory is not known"
    if margin.needed > room:
        return f"verdict: does not fit, {gib(margin.needed)} needed, {gib(room)} free"
    if margin.tight > room:
        return f"verdict: tight, {gib(margin.needed)} to {gib(margin.tight)} needed, {gib(room)} free"
    return f"verdict: fits, {gib(margin.needed)} needed, {gib(room)} free"


def run(load: Load, room: int | None, checks: list[preflight.Check]) -> tuple[str, Exit]:
    """The measured part of the report, and the exit code of the whole."""
    console.info("measuring the memory of a step by fake tensors")
    lines, good = memory(load, room)
    failing = any(c.status == preflight.ERROR for c in checks)
    return "\n".join(
        ["", "Memory of a step, per rank", *(f"  {line}" for line in lines)]
    ), Exit.RESOURCES if failing or not good else Exit.DONE
