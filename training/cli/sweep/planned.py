"""The plan of each run, made before anything starts, and the GPUs of the runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from training.cli.sweep.fixes import Collected
from training.cli.sweep.grid import Combination
from training.cli.sweep.options import SweepOptions, own_words
from training.cli.sweep.slots import Slot, emptiest, gpu_slots, jobs, taken
from training.core import codes
from training.core.errors import Exit, Problem, UserError
from training.core.sweep_dir import COMMAND
from training.host import gpus, nvml
from training.plan import builder, training_plan
from training.plan.request import Request

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

GPU_CODE = f"{codes.CHECKS}.gpu"  # of the memory and the processes of one GPU


@dataclass
class Planned:
    """`slots`: one for each of the runs side by side; `warnings`: of all plans, each once."""

    machine: gpus.GpuInventory
    slots: list[Slot] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan(
    requests: Sequence[Request],
    runs: Sequence[Combination],
    labels: Sequence[str],
    options: SweepOptions,
    environ: Mapping[str, str],
) -> Planned:
    """The plans are spread over the GPUs, so that a GPU without enough free memory is found before
    anything starts. Raises UserError with the problems of all runs."""
    wanted = any(request.config.device != "cpu" for request in requests)
    machine = emptiest(options, len(runs), environ) if wanted else gpus.GpuInventory((), "")
    slots, per_run = gpu_slots(machine.gpus, options.gpus_per_run), options.gpus_per_run
    used = slots[: options.jobs or len(slots)] or [Slot()]
    full = [taken(machine.gpus[at * per_run : (at + 1) * per_run]) for at in range(len(used))]
    free = [slot for slot, one in zip(used, full, strict=True) if not one]
    out, wrong = Planned(machine), Collected(len(runs), own_words(options))
    with nvml.held() if slots else nullcontext():
        for at, (request, run, name) in enumerate(zip(requests, runs, labels, strict=True)):
            slot = used[at % len(used)]
            here = {gpus.VISIBLE: slot.visible} if slot.visible else {}
            try:
                made, checks = training_plan.build(replace(request), {**environ, **here})
            except UserError as error:
                others = free if full[at % len(used)] else []
                wrong.add(_on_others(error.problems, others, options), run, name)
                continue
            out.plans.append(made)
            out.warnings += builder.warnings(checks)
    if found := wrong.problems():
        raise UserError(found, Exit.RESOURCES)
    out.warnings = list(dict.fromkeys(out.warnings))
    on_gpus = any(one["device"]["value"] == "cuda" for one in out.plans)
    out.slots = jobs(options, slots if on_gpus else [], len(runs))
    return out


def _on_others(
    problems: Sequence[Problem], free: Sequence[Slot], options: SweepOptions
) -> Sequence[Problem]:
    """First of all, the sweep on the `free` GPUs."""
    if not free:
        return problems
    fewer = replace(options, jobs=options.jobs if len(free) >= (options.jobs or 0) else None)
    words = shlex.join([*own_words(fewer), *options.rest])
    fix = f"{gpus.VISIBLE}={','.join(slot.named for slot in free)} {COMMAND} {words}"
    return [
        replace(one, fixes=[fix, *one.fixes]) if one.code == GPU_CODE else one for one in problems
    ]
