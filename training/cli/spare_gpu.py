"""The GPU of a command that uses a trained model: none on which a training runs."""

from __future__ import annotations

import os
from dataclasses import replace

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host import gpu_claims, gpus, process
from training.host.gpu_choice import ORDER, PCI, closed, emptiest_gpus
from training.host.gpus import EXCLUSIVE, VISIBLE, Gpu


def choose(device: str) -> str:
    """The device for trained.load(), cpu instead of auto if no GPU is free. Makes the GPU the only
    visible one, so before the first call of CUDA; one that the user has selected stays. Raises
    UserError."""
    if device == "cpu" or VISIBLE in os.environ:
        return device
    machine = gpus.inventory_at_start(os.environ)
    launched_by = process.ancestors()  # a command in --notify, for example
    claims = {uuid: pid for uuid, pid in gpu_claims.others().items() if pid not in launched_by}
    usable = [gpu for gpu in machine.gpus if gpu.uuid not in claims and not closed(gpu)]
    if machine.gpus and not usable:
        why = msg("host.gpus.comma").join(_why(gpu, claims.get(gpu.uuid)) for gpu in machine.gpus)
        if device == "auto":
            log.warning(msg("cli.spare_gpu.cpu", gpus=why))
            return "cpu"
        # a training in exclusive mode could not start its ranks again
        usable = [gpu for gpu in machine.gpus if not closed(gpu) and gpu.compute_mode != EXCLUSIVE]
        if not usable:
            what, allowed = msg("cli.spare_gpu.none", gpus=why), msg("tasks.trained.devices_free")
            raise UserError(Problem("gpu.memory", what, allowed, ["--device=cpu"]), Exit.RESOURCES)
    # the order matters to numbers of the user only
    environ = {name: value for name, value in os.environ.items() if name != ORDER}
    choice = emptiest_gpus(replace(machine, gpus=tuple(usable)), 1, environ, hide=True)
    if len(machine.gpus) > 1:
        os.environ[ORDER] = PCI
    if choice.visible is not None:
        os.environ[VISIBLE] = choice.visible
    return device


def _why(gpu: Gpu, pid: int | None) -> str:
    if pid is not None:
        return msg("cli.spare_gpu.training", index=gpu.index, pid=pid)
    return msg("cli.spare_gpu.closed", index=gpu.index, mode=gpu.compute_mode)
