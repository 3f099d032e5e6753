"""The places of the runs side by side: each has GPUs of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.cli.sweep.options import SweepOptions
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.sweep_dir import COMMAND
from training.core.units import plural
from training.host import gpu_claims, gpus, visible_devices
from training.host.gpu_choice import closed, emptiest_gpus, half_empty
from training.host.visible_devices import PART


@dataclass(frozen=True)
class Slot:
    """A place for one run: CUDA_VISIBLE_DEVICES ('': as it is) and the indices of the GPUs."""

    visible: str = ""
    indices: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "GPU " + ", ".join(map(str, self.indices)) if self.indices else ""

    @property
    def named(self) -> str:
        """CUDA_VISIBLE_DEVICES for a person: numbers, except for instances (MIG), which share
        that of their GPU."""
        return self.visible if PART in self.visible else ",".join(map(str, self.indices))


def emptiest(options: SweepOptions, runs: int, environ: Mapping[str, str]) -> gpus.GpuInventory:
    """The machine, with the emptiest GPUs alone where it has more than the runs side by side need;
    a selection of the user stays as it is."""
    machine, per_run = gpus.inventory_at_start(environ), options.gpus_per_run
    side_by_side = max(1, min(options.jobs or len(machine.gpus) // per_run, runs))
    others = gpu_claims.others()
    chosen = emptiest_gpus(machine, side_by_side * per_run, environ, hide=True, claims=others)
    return chosen.machine


def taken(group: Sequence[gpus.Gpu]) -> bool:
    """Whether others use so much of one of these GPUs that a run is likely to be refused."""
    return any(closed(gpu) or not half_empty(gpu) for gpu in group)


def gpu_slots(machine: Sequence[gpus.Gpu], per_run: int) -> list[Slot]:
    """The GPUs of each run that fits on the machine side by side with the others."""
    groups = [machine[at : at + per_run] for at in range(0, len(machine) - per_run + 1, per_run)]
    return [
        Slot(
            ",".join(visible_devices.naming([(gpu.uuid, gpu.index) for gpu in group])),
            tuple(gpu.index for gpu in group),
        )
        for group in groups
    ]


def jobs(options: SweepOptions, slots: Sequence[Slot], runs: int) -> list[Slot]:
    """A slot for each of the runs side by side. Raises UserError for more jobs than GPUs."""
    if not slots:
        return [Slot()] * min(options.jobs or 1, runs)
    side_by_side = min(options.jobs or len(slots), runs)
    if options.jobs and side_by_side > len(slots):
        what = msg(
            "cli.sweep.more_jobs",
            jobs=options.jobs,
            gpus=plural(len(slots) * options.gpus_per_run, "GPU"),
            per_run=options.gpus_per_run,
        )
        allowed = msg("cli.sweep.jobs_at_most", most=len(slots))
        raise UserError(Problem("sweep.jobs", what, allowed, [f"{COMMAND} … --jobs=auto"], "jobs"))
    return list(slots[:side_by_side])
