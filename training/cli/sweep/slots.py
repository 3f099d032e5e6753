"""The places of the runs side by side: each has GPUs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.cli.sweep.options import SweepOptions
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.sweep_dir import COMMAND
from training.core.units import plural
from training.host import gpus, visible_devices


@dataclass(frozen=True)
class Slot:
    """A place for one run: CUDA_VISIBLE_DEVICES ('': as it is) and the indices of the GPUs."""

    visible: str = ""
    indices: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "GPU " + ", ".join(map(str, self.indices)) if self.indices else ""


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
    if options.jobs and options.jobs > len(slots):
        what = msg(
            "cli.sweep.more_jobs",
            jobs=options.jobs,
            gpus=plural(len(slots) * options.gpus_per_run, "GPU"),
            per_run=options.gpus_per_run,
        )
        allowed = msg("cli.sweep.jobs_at_most", most=len(slots))
        raise UserError(Problem("sweep.jobs", what, allowed, [f"{COMMAND} … --jobs=auto"], "jobs"))
    return list(slots[: min(options.jobs or len(slots), runs)])
