"""Which of the machine's GPUs a launch uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.core.messages import msg
from training.host import env_vars, gpu_claims, gpus
from training.host.gpu_choice import GpuChoice, emptiest_gpus
from training.host.gpus import GpuInventory
from training.host.placement import RANK
from training.plan.request import LaunchRequest, Request

if TYPE_CHECKING:
    from training.core.contracts.plan import PlanStart


def choose(request: LaunchRequest, environ: Mapping[str, str], not_asked: str) -> GpuChoice:
    """`not_asked`: why a run that shall not use GPUs has none."""
    if request.config.device == "cpu":
        return GpuChoice(GpuInventory((), not_asked))
    with gpu_claims.choosing():
        found = _choice(request, environ)
        if request.starter and (used := found.machine.gpus[: request.gpu_ranks]):
            gpu_claims.claim(request.starter, used)
    return found


def use(request: LaunchRequest, begun: PlanStart, choice: GpuChoice) -> None:
    """The ranks see the GPUs that were chosen, if there is a choice and they use any."""
    on_gpus = begun["device"]["value"] == "cuda"
    if request.starter and not on_gpus:
        gpu_claims.release(request.starter)
    if choice.visible is None:
        return
    others = [v for v in begun["variables"] if v["name"] != gpus.VISIBLE]
    chosen = env_vars.Variable(gpus.VISIBLE, choice.visible, choice.why, env_vars.HERE)
    begun["variables"] = [*others, *([chosen.record()] if on_gpus else [])]


def _choice(request: LaunchRequest, environ: Mapping[str, str]) -> GpuChoice:
    if isinstance(request, Request) and request.chosen_gpu and gpus.VISIBLE not in environ:
        named = request.chosen_gpu
        why = msg("plan.device.gpu_ids", config_file=request.config_file)
        return GpuChoice(gpus.inventory_at_start({**environ, gpus.VISIBLE: named}), named, why)
    machine = gpus.inventory_at_start(environ)
    if request.place.kind == RANK or not request.gpu_ranks:
        return GpuChoice(machine)
    task = isinstance(request, Request)
    others = gpu_claims.others()
    return emptiest_gpus(machine, request.gpu_ranks, environ, hide=task, claims=others)
