"""Checks of this machine before launch. Error: the run would fail; warning: it may fail.

`at_every_start`: cheap checks for fatal problems. `only_in_check`: checks that take time or rarely
matter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from training import tasks
from training.core.messages import msg
from training.host import cgroups, decisions, torch_build
from training.host.gpus import GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight import torch_import, torch_wheels
from training.plan.preflight.cpu_checks import cpu
from training.plan.preflight.folder_checks import folder, run_folder
from training.plan.preflight.gpu_checks import (
    compile_left_out,
    compile_works,
    gpus,
    in_parts,
    torch_fits,
)
from training.plan.preflight.precision_checks import precision_works
from training.plan.preflight.report import (
    DATA,
    ERROR,
    OF_MACHINE,
    OK,
    WANDB,
    WARNING,
    Check,
    count,
    table,
    unusable,
    with_lines,
    worst,
)
from training.plan.preflight.startup_checks import (
    host_memory,
    not_running,
    open_files,
    port,
    ram_beside_gpus,
    shared_memory,
)
from training.plan.preflight.torch_kernels import kernels
from training.plan.request import LaunchRequest, Request
from training.tasks.memory import Estimate, StepNeeds

__all__ = [
    "ERROR", "OF_MACHINE", "OK", "WARNING", "Check", "PreflightContext", "at_every_start",
    "compile_left_out", "compile_works", "count", "folder", "gpus", "host_memory", "in_parts",
    "not_running", "of_ranks", "only_in_check", "port", "precision_works", "shared_memory",
    "smaller_runs", "table", "torch_fits", "unusable", "with_lines", "worst",
]  # fmt: skip


@dataclass(frozen=True)
class _Nothing:
    """The estimate of a run with unknown needs."""

    parameters: int = 0
    optimizer: int = 0
    average: int = 0
    total: int = 0
    needed: int = 0
    tight: int = 0


@dataclass(frozen=True)
class PreflightContext:
    """Input of the checks. `room`: free bytes per rank; `step`: None if its needs are unknown."""

    request: LaunchRequest
    machine: GpuInventory
    torch: TorchBuild | None
    device: str
    room: int | None = None
    step: StepNeeds | None = None

    @property
    def estimate(self) -> Estimate:
        return self.step.estimate if self.step else _Nothing()

    @property
    def workers(self) -> int:
        return self.request.config.num_workers if isinstance(self.request, Request) else 0

    @property
    def most_workers(self) -> int:
        """Per rank, during a validation: those of the epoch keep their batches."""
        more = (
            isinstance(self.request, Request)
            and self.request.config.eval_every > 0
            and self.request.kind.validation_workers
        )
        return self.workers * (2 if more else 1)


def at_every_start(facts: PreflightContext) -> list[Check]:
    """The checks of every start; milliseconds in total."""
    request, estimate, step = facts.request, facts.estimate, facts.step
    ranks, room = request.local_ranks, facts.room
    group = cgroups.memory() if facts.device == "cpu" else None
    if group:
        room = min(room, group.room // ranks) if room is not None else group.room // ranks
    small = step is not None and room is not None and estimate.needed > room
    smaller = smaller_runs(request, step, room) if small and step and room else []
    # Before the installation of .venv, its torch counts. A script may need an older one.
    checked = isinstance(request, Request) and request.installed
    old = torch_import.too_old(facts.torch, request) if checked else []
    checks: list[Check] = [*old]
    if facts.device == "cuda":
        cards = facts.machine.gpus[: request.gpu_ranks]
        torch = facts.torch
        other: list[str] = []
        if torch:
            by = torch_build.chosen_by(torch, os.environ)
            other = torch_wheels.older(facts.machine, torch.version, request, by)
        checks += [
            *gpus(facts.machine, estimate, request, smaller, step),
            *([] if old else torch_fits(facts.machine, facts.torch, request, step, other)),
            *kernels(cards, facts.torch, request, step, other),
            *torch_wheels.before_install(facts.machine, facts.torch, request, os.environ),
        ]
        if step and decisions.shares_host_memory(facts.device, request.gpu_ranks, facts.machine):
            # A warning at most: a driver may report no memory for another reason.
            beside = host_memory(room, estimate, request, smaller)
            checks.append(beside if beside.status == OK else replace(beside, status=WARNING))
        else:
            resumes = request.resume_from is not None
            checks.append(ram_beside_gpus(estimate, step, ranks, resumes=resumes))
    elif step:
        checks.append(host_memory(room, estimate, request, smaller))
    checks.append(cpu(facts.workers, ranks, request.place, os.environ, request.command_with))
    shm = shared_memory(facts.most_workers, ranks, nccl=facts.device == "cuda")
    checks += [shm] if shm else []
    checks.append(open_files(facts.most_workers, ranks))
    checks.append(run_folder(request, step))
    another = ["--log_dir=/another/folder"]
    checks.append(folder("log", request.logs, 1 << 20, request.origins["log_dir"], another))
    if request.resume_from and request.place.leads:
        launches = not (request.dry_run or request.check)
        checks += not_running(request.resume_from, waits=launches)
    return checks


def smaller_runs(request: LaunchRequest, step: StepNeeds, room: int) -> list[str]:
    """Commands of runs that fit `room` bytes per rank; those of another model are marked. Weights
    that are read have their model."""
    read = request.resume_from or (isinstance(request, Request) and request.start)
    found = []
    for changes in step.suggestions(request.config, request.ranks, room):
        other = step.MODEL & changes.keys()
        if other and read:
            continue
        command = request.command(**changes)
        found.append(msg("plan.memory.other_model", command=command) if other else command)
    return found


def of_ranks(request: LaunchRequest, checks: list[Check]) -> list[Check]:
    """`checks` without those of a machine that has no ranks."""
    if request.trains_here:
        return checks
    kept = [check for check in checks if check.name in (DATA, WANDB)]
    return [Check("machine", OK, msg("plan.host.elsewhere")), *kept]


def only_in_check(facts: PreflightContext) -> list[Check]:
    """The further checks of --check: many files, network, slow driver queries; at most a second."""
    from training.plan.preflight import data_checks, host_checks, versions

    request, several = facts.request, facts.request.local_ranks != facts.request.ranks
    checks: list[Check] = []
    if facts.device == "cuda" and facts.machine.gpus:
        from training.plan.preflight import gpu_health

        checks += gpu_health.checks(facts.machine.gpus[: request.gpu_ranks])
    checks += [host_checks.host_name(several), host_checks.clock()]
    if isinstance(request, Request):
        checks += (
            [data_checks.data(request.source.files, request.config.data)] if request.source else []
        )
        checks.append(data_checks.wandb(request.config, tasks.login_key(request.config_file)))
    return [*checks, versions.check(facts.torch, facts.machine)]
