"""Checks before every start on GPUs: enough of them, free memory, and a torch that can use them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from training.config.schema import Config
from training.core import units
from training.core.messages import msg
from training.diagnose import signatures
from training.host import gpu_claims, gpu_processes, process
from training.host.gpu_choice import closed, emptiest_gpus
from training.host.gpus import VISIBLE, Gpu, GpuInventory, silent_quotes
from training.host.placement import LOCAL, RANK
from training.host.torch_build import TorchBuild
from training.host.visible_devices import PART
from training.plan.field_checks import GPU_ONLY
from training.plan.preflight import one_gpu
from training.plan.preflight.report import ERROR, OK, WARNING, Check, with_lines
from training.plan.request import LaunchRequest
from training.tasks import memory
from training.tasks.memory import StepNeeds

# a few cores: two of them compute the quickstart's 1.5e13 operations in a minute
CPU_FLOPS, PATIENCE_S = 1e11, 600


def on_cpu(request: LaunchRequest, step: StepNeeds | None) -> list[str]:
    """The command of the same run on the CPU; [] if it would take hours."""
    flops = step.flops(request.config.num_iterations) if step else None
    if flops is not None and (not flops or flops / CPU_FLOPS > PATIENCE_S):
        return []
    auto = {"precision": "auto"} if request.config.precision in GPU_ONLY else {}
    return [request.command(device="cpu", **auto)]


def gpus(
    machine: GpuInventory,
    estimate: memory.Estimate,
    request: LaunchRequest,
    smaller: list[str],
    step: StepNeeds | None = None,
) -> Iterable[Check]:
    """Enough GPUs, each with memory for the estimate, and the processes on them. `smaller`:
    commands that need less memory."""
    have, ranks = len(machine.gpus), request.gpu_ranks
    if have < ranks:
        parts = [msg("plan.gpus.whole")] if "MIG-" in machine.reason else []
        usable = [one for one in _all(machine) if (one.free_bytes or 0) >= estimate.needed]
        fixes = [*_repairs(machine), *parts, *_all_visible(usable, request)]
        fixes += [request.command_with(have)] if have else []
        anywhere = msg("plan.gpus.anywhere")
        fixes += [
            *on_cpu(request, step),
            f"./train_dual_gpu.sh configs/dual_gpu/quickstart.py   # {anywhere}",
        ]
        yield Check(
            "GPUs",
            ERROR,
            msg(
                "plan.gpus.too_few",
                needed=units.plural(ranks, "GPU is", "GPUs are"),
                have=have,
                reason=machine.reason,
            ),
            fixes,
        )
        return
    yield Check(
        "GPUs",
        OK,
        msg(
            "plan.gpus.visible",
            have=have + machine.spare,
            ranks=ranks,
            driver=machine.driver or units.unknown(),
            cuda=machine.cuda or units.unknown(),
        ),
    )
    for index in machine.silent:
        kernel = silent_quotes([*machine.gpus, *machine.hidden])
        text = with_lines(msg("plan.gpus.silent"), kernel.lines)
        yield Check(f"GPU {index}", WARNING, text, ["nvidia-smi", *kernel.commands])
    ours, claims = {os.getpid(), os.getppid()}, gpu_claims.others()
    if request.place.kind == RANK:  # of torchrun or another launcher, which starts the others too
        ours |= process.children(os.getppid())
    fixes = [*_fewer_ranks(machine, request, step), *smaller]
    idle = [
        one
        for one in _all(machine)
        if (one.free_bytes or 0) >= estimate.tight and not one.processes and one.uuid not in claims
    ]
    elsewhere = _all_visible(idle, request)
    for gpu in machine.gpus[:ranks]:
        if not gpu.processes and gpu.uuid in claims:
            gpu = replace(gpu, processes=(gpu_processes.here(claims[gpu.uuid]),))  # noqa: PLW2901
        yield one_gpu.check(gpu, estimate, fixes, ours, elsewhere, measured=request.check)
        if gpu.mig and not (gpu.uuid.startswith(PART) and ranks == 1):
            yield in_parts(gpu, ranks, request.command_with(1))


def _repairs(machine: GpuInventory) -> list[str]:
    """Repairs of the driver or a GPU, by the reason for the number of GPUs."""
    from training.diagnose import advice, scan

    found = (
        sentences
        for signature, groups in scan.matched(f"{machine.reason}\n{machine.failure}")
        if signature.role in (signatures.ROOT, signatures.WEAK)
        and (sentences := advice.filled(signature.advice, groups))
    )
    return next(found, ["nvidia-smi"] if machine.failure else [])


def _all(machine: GpuInventory) -> list[Gpu]:
    """The GPUs that a rank could use, also those that CUDA_VISIBLE_DEVICES leaves out."""
    return [one for one in (*machine.gpus, *machine.hidden) if not one.mig and not closed(one)]


def _all_visible(usable: Sequence[Gpu], request: LaunchRequest) -> list[str]:
    """The same command with all GPUs of the machine visible, if enough of them are `usable`; [] in
    an allocation, where the others may belong to other jobs."""
    if request.place.kind != LOCAL or process.BATCH_JOB & os.environ.keys():
        return []
    enough = VISIBLE in os.environ and len(usable) >= request.gpu_ranks
    return [f"env -u {VISIBLE} {request.command()}"] if enough else []


def _fewer_ranks(
    machine: GpuInventory,
    request: LaunchRequest,
    step: StepNeeds | None,
) -> list[str]:
    """The command of the same run on those of its GPUs that have enough memory; [] if all or none
    have."""
    least = request.config.min_ranks
    for ranks in range(request.gpu_ranks - 1, 0, -1):
        if (
            step is None
            or request.place.kind != LOCAL
            or (isinstance(least, int) and ranks < least)
        ):
            return []
        needed = step.resized(ranks=ranks).estimate.needed  # more, if ranks share a state
        own = machine.gpus[: request.gpu_ranks]
        roomy = [gpu for gpu in own if (gpu.free_bytes or 0) >= needed and not closed(gpu)]
        if len(roomy) >= ranks:
            break
    else:
        return []
    command = request.command_with(ranks)
    chosen = emptiest_gpus(machine, ranks, os.environ, hide=True).machine.gpus[:ranks]
    if all(gpu in roomy for gpu in chosen):
        return [command]
    named = ",".join(gpu.uuid or str(gpu.index) for gpu in roomy[:ranks])
    return [f"{VISIBLE}={named} {command}"]


def in_parts(gpu: Gpu, ranks: int, other: str) -> Check:
    """A GPU in parts. A process sees one part at most, so two ranks would take the same one, which
    NCCL refuses. `other`: a command that works as it is."""
    name, whole = f"GPU {gpu.index} parts", f"sudo nvidia-smi -i {gpu.index} -mig 0"
    if ranks == 1:
        return Check(name, WARNING, msg("plan.gpus.mig"), [whole])
    return Check(name, ERROR, msg("plan.gpus.mig_ranks"), [whole, other])


def torch_fits(
    machine: GpuInventory,
    torch: TorchBuild | None,
    request: LaunchRequest,
    step: StepNeeds | None = None,
    other: Sequence[str] = (),
) -> Iterable[Check]:
    """The installed torch can use these GPUs: built for CUDA, and for a version that the driver
    supports. `other`: commands that install another build (torch_wheels)."""
    if torch is None or not machine.gpus:
        return
    name = f"torch {torch.version}"
    if torch.cuda is None:
        fixes = [
            *on_cpu(request, step),
            msg("plan.torch.install_cuda"),
        ]
        yield Check("torch", ERROR, msg("plan.torch.cpu_only", name=name), fixes)
    elif machine.cuda and int(machine.cuda.split(".")[0]) < int(torch.cuda.split(".")[0]):
        text = msg(
            "plan.torch.newer_cuda",
            name=name,
            cuda=torch.cuda,
            driver=machine.driver,
            supported=machine.cuda,
        )
        yield Check(
            "torch",
            ERROR,
            text,
            [
                msg("plan.torch.update_driver"),
                *(other or [msg("plan.torch.install_older", cuda=machine.cuda.split(".")[0])]),
            ],
        )
    else:
        yield Check("torch", OK, f"{name}, CUDA {torch.cuda}")


def compile_works(
    torch: TorchBuild | None,
    device: str,
    missing: Mapping[str, str],
    request: LaunchRequest,
    no_bf16_on: str = "",
) -> Iterable[Check]:
    """`missing`: what torch.compile lacks here → a command that provides it. `no_bf16_on`: a GPU
    that only emulates the bf16 of this run."""
    eager = request.command(compile=0)
    if no_bf16_on:
        text = msg("host.decision.compile_no_bf16", name=no_bf16_on)
        yield Check("compile", WARNING, text, [eager])
    if missing:
        text = msg("host.decision.compile_lacks", lacks=", ".join(missing))
        yield Check("compile", ERROR, text, [*filter(None, missing.values()), eager])
    # For CPUs torch.compile builds a shell command without quoting the path of torch.
    if device == "cpu" and torch is not None and re.search(r"[\s'\"]", torch.folder):
        text = msg("plan.torch.folder_quoted", folder=torch.folder)
        yield Check("compile", ERROR, text, [eager])


def compile_left_out(
    config: Config, device: str, missing: Mapping[str, str], no_bf16_on: str = ""
) -> Iterable[Check]:
    """For a GPU run that would be compiled after an installation; a GPU that cannot run compiled
    code gets no warning."""
    could = device == "cuda" and config.compile == "auto" and not no_bf16_on
    if could and missing and all(missing.values()):
        lacks, commands = ", ".join(missing), " && ".join(missing.values())
        text = msg("plan.compile.left_out", lacks=lacks, commands=commands)
        yield Check("compile", WARNING, text)
