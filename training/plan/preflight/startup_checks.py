"""Checks before every start: they take no time worth speaking of, and what they find would end the
run, or soon slow it down."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from training.core import rundir, units
from training.host import cgroups, env_vars, ports
from training.host.gpus import EXCLUSIVE, PROHIBITED, Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight.report import ERROR, OK, WARNING, Check
from training.plan.request import LaunchRequest
from training.tasks import memory
from training.tasks.memory import StepNeeds

RECOMMENDED_GPU_BYTES = 20 * 10**9  # what the original configs were made for
WORKER_SHM_BYTES = 64 << 20
NCCL_SHM_BYTES = 256 << 20  # where GPUs can not copy directly; containers get 64 MiB by default
RANK_FILES, WORKER_FILES = 256, 32
# a few cores: the quickstart takes two of them a minute for 1.5e13 operations
CPU_FLOPS, PATIENCE_S = (
    1e11,
    600,
)
RANK_RAM_BYTES = 2 << 30  # torch with CUDA, an estimate


def on_cpu(request: LaunchRequest, step: StepNeeds | None) -> list[str]:
    """The same run on the CPU, unless that would take hours there."""
    flops = step.flops(request.config.num_iterations) if step else None
    if flops is not None and (not flops or flops / CPU_FLOPS > PATIENCE_S):
        return []
    return [request.command(device="cpu")]


def gpus(
    machine: GpuInventory,
    estimate: memory.Estimate,
    request: LaunchRequest,
    smaller: list[str],
    step: StepNeeds | None = None,
) -> Iterable[Check]:
    """Enough GPUs, each with room for the estimate, and who is on them; `smaller`: commands for
    runs that fit."""
    have, ranks = len(machine.gpus), request.gpu_ranks
    if have < ranks:
        parts = (
            ["name whole GPUs in CUDA_VISIBLE_DEVICES: parts of one (MIG) are not counted"]
            if "MIG-" in machine.reason
            else []
        )
        fixes = [*parts, *([request.command_with(have)] if have else [])]
        fixes += [
            *on_cpu(request, step),
            "./train_dual_gpu.sh configs/dual_gpu/quickstart.py   # two ranks on any machine",
        ]
        yield Check(
            "GPUs",
            ERROR,
            f"{units.plural(ranks, 'GPU is', 'GPUs are')} needed, {have} visible: {machine.reason}",
            fixes,
        )
        return
    yield Check(
        "GPUs",
        OK,
        f"{have} visible, {ranks} used; driver {machine.driver or '-'}, CUDA up to "
        f"{machine.cuda or '-'}",
    )
    for gpu in machine.gpus[:ranks]:
        yield from _gpu(gpu, estimate, smaller)


def _gpu(gpu: Gpu, estimate: memory.Estimate, smaller: list[str]) -> Iterable[Check]:
    name = f"GPU {gpu.index}"
    shown = f"{gpu.name}, {memory.gib(gpu.free_bytes)} free of {memory.gib(gpu.total_bytes)}"
    strangers = [p for p in gpu.processes if p.pid not in (os.getpid(), os.getppid())]
    said = [f"pid {p.pid} ({p.user}, {memory.gib(p.used_bytes)}): {p.command}" for p in strangers]
    occupied = "; occupied by " + ", ".join(said) if strangers else ""
    kill = [f"kill {p.pid}   # if it is yours: {p.command[:40]}" for p in strangers]
    if gpu.compute_mode == PROHIBITED or (gpu.compute_mode == EXCLUSIVE and strangers):
        why = (
            "no program may use it"
            if gpu.compute_mode == PROHIBITED
            else f"one process at a time may use it{occupied}"
        )
        fixes = [*(kill if strangers else []), f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"]
        yield Check(name, ERROR, f"{shown}: its compute mode is '{gpu.compute_mode}', {why}", fixes)
    elif gpu.free_bytes is None:
        yield Check(
            name, WARNING, f"{shown}: the driver does not tell the free memory{occupied}", kill
        )
    elif gpu.free_bytes < estimate.needed:
        fixes = [*smaller, *kill] or [f"a GPU with {memory.gib(estimate.needed)} free"]
        yield Check(
            name, ERROR, f"{shown}: this run needs {memory.gib(estimate.needed)}{occupied}", fixes
        )
    elif gpu.free_bytes < estimate.tight:
        yield Check(
            name,
            WARNING,
            f"{shown}: tight, the run may need {memory.gib(estimate.tight)}{occupied}",
            kill,
        )
    elif strangers:
        yield Check(name, WARNING, f"{shown}{occupied}", kill)
    else:
        small = gpu.total_bytes is not None and gpu.total_bytes < RECOMMENDED_GPU_BYTES
        yield Check(
            name,
            OK,
            shown + ("; 20 GB or more are recommended for the dual-GPU configs" if small else ""),
        )
    if gpu.mig:
        text = (
            "it is split (MIG): a rank gets one part of it and its memory, not what is shown "
            "here; parts can not copy to each other"
        )
        yield Check(f"{name} parts", WARNING, text, [f"sudo nvidia-smi -i {gpu.index} -mig 0"])


def torch_fits(
    machine: GpuInventory,
    torch: TorchBuild | None,
    request: LaunchRequest,
    step: StepNeeds | None = None,
) -> Iterable[Check]:
    """The installed torch can use these GPUs: built for CUDA, and not for a newer one than the
    driver runs."""
    if torch is None or not machine.gpus:
        return
    name = f"torch {torch.version}"
    if torch.cuda is None:
        fixes = [
            *on_cpu(request, step),
            "install a CUDA build of torch, or point TORCH_LOCAL_PATH to one",
        ]
        yield Check(
            "torch", ERROR, f"{name} is built for the CPU only: it can not use a GPU", fixes
        )
    elif machine.cuda and int(machine.cuda.split(".")[0]) < int(torch.cuda.split(".")[0]):
        text = (
            f"{name} is built for CUDA {torch.cuda}; driver {machine.driver} runs CUDA up to "
            f"{machine.cuda}"
        )
        yield Check(
            "torch",
            ERROR,
            text,
            [
                "update the NVIDIA driver",
                f"install a torch built for CUDA {machine.cuda.split('.')[0]}",
            ],
        )
    else:
        yield Check("torch", OK, f"{name}, CUDA {torch.cuda}")


def compile_works(torch: TorchBuild | None, device: str, request: LaunchRequest) -> list[Check]:
    """torch's code generator for CPUs builds a shell command without quoting its own folder."""
    if device != "cpu" or torch is None or not re.search(r"[\s'\"]", torch.folder):
        return []
    text = (
        f"torch.compile on a CPU fails when torch is in a folder with a space or quote, as "
        f"here: {torch.folder}"
    )
    return [Check("compile", ERROR, text, [request.command(compile=0)])]


def not_running(run: rundir.RunDir) -> list[Check]:
    """The run to resume has ended: two supervisors in one run directory would overwrite each
    other."""
    facts = rundir.read_json(run.supervisor) or {}
    pid = facts.get("pid")
    if pid is None or facts.get("host") != socket.gethostname():
        return []
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    if os.fsencode(run.path) not in words:
        return []  # the number belongs to another process by now
    return [
        Check(
            "run",
            ERROR,
            f"{run.name} is still running (pid {pid})",
            [f"./monitor_training.sh --run={shlex.quote(str(run.path))}", f"kill {pid}"],
        )
    ]


def host_memory(
    room: int | None, estimate: memory.Estimate, request: LaunchRequest, smaller: list[str]
) -> Check:
    """Training on the CPU: the ranks live in host memory."""
    ranks, limit = request.local_ranks, cgroups.says_who()
    shown = (
        f"{memory.gib(room)} free for each of {ranks} ranks"
        if ranks > 1
        else f"{memory.gib(room)} free"
    )
    if room is not None and room < estimate.needed:
        fixes = smaller or [
            f"a machine or container with {memory.gib(ranks * estimate.needed)} free"
        ]
        return Check(
            "host memory",
            ERROR,
            f"{shown}: this run needs {memory.gib(estimate.needed)} per rank{limit}",
            fixes,
        )
    if room is not None and room < estimate.tight:
        return Check(
            "host memory",
            WARNING,
            f"{shown}: tight, this run may need {memory.gib(estimate.tight)} per rank{limit}",
        )
    return Check("host memory", OK, f"{shown}, {memory.gib(estimate.needed)} needed{limit}")


def folder(name: str, path: Path, flag: str, needed: int, origin: str) -> Check:
    """The folder (or the nearest parent that is there) takes files, and the disk has room. Leaves
    nothing behind."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    shown = f"{name} folder {path} ({origin})"
    fixes = [f"--{flag}=/another/folder"]
    if not there.is_dir():
        return Check(f"{name} folder", ERROR, f"{shown}: {there} is not a folder", fixes)
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Check(
            f"{name} folder", ERROR, f"{shown} can not be written: {error.strerror}", fixes
        )
    free = shutil.disk_usage(there).free
    if free < needed:
        return Check(
            f"{name} folder",
            ERROR,
            f"{shown}: {memory.gib(free)} free, {memory.gib(needed)} needed",
            fixes,
        )
    return Check(f"{name} folder", OK, f"{path}: {memory.gib(free)} free")


def shared_memory(num_workers: int, ranks: int, nccl: bool = False) -> Check | None:
    """Data-loader workers hand batches over through /dev/shm; so does NCCL where GPUs can not copy
    to each other."""
    workers = num_workers * ranks
    nccl = nccl and ranks > 1
    if not (workers or nccl) or not os.path.isdir("/dev/shm"):
        return None
    free, needed = (
        shutil.disk_usage("/dev/shm").free,
        max(workers * WORKER_SHM_BYTES, NCCL_SHM_BYTES if nccl else 0),
    )
    if free < needed:
        whom = " and ".join(
            filter(
                None,
                (
                    units.plural(workers, "worker") if workers else "",
                    f"NCCL between {ranks} ranks" if nccl else "",
                ),
            )
        )
        fixes = [
            "docker run --shm-size=8g …   # in a container",
            "sudo mount -o remount,size=8g /dev/shm",
        ]
        return Check(
            "/dev/shm",
            WARNING,
            f"{memory.gib(free)} free for {whom}",
            (["--num_workers=0"] if workers else []) + fixes,
        )
    return Check("/dev/shm", OK, f"{memory.gib(free)} free")


def cpu(num_workers: int, ranks: int, command_with: Callable[[int], str]) -> Check:
    """A core for each rank, and for its workers; `command_with`: the user's command for so many
    ranks."""
    cores, workers = env_vars.cpu_count(), num_workers * ranks
    machine = os.cpu_count() or cores
    shown = f"{cores}{f' of {machine}' if machine != cores else ''} core{'s' if cores != 1 else ''}"
    whom = units.plural(ranks, "rank") + (
        f" and {units.plural(workers, 'worker')}" if workers else ""
    )
    if ranks > cores:
        text = f"{ranks} ranks share {cores} CPU core{'s' if cores != 1 else ''}: it works, slowly"
        return Check("CPU", WARNING, text, [command_with(cores)])
    if workers > cores:
        return Check(
            "CPU",
            WARNING,
            f"{shown} for {whom}: more workers than cores",
            [f"--num_workers={max(0, cores // ranks - 1)}"],
        )
    return Check("CPU", OK, f"{shown} for {whom}")


def open_files(num_workers: int, ranks: int) -> Check:
    """A rank with torch, data and trackers has some hundred files open; the supervisor has some for
    each rank."""
    most, raisable = cgroups.open_files()
    needed = max(RANK_FILES + WORKER_FILES * num_workers, 64 + 8 * ranks)
    if most >= needed:
        return Check(
            "open files",
            OK,
            "no limit" if most >= cgroups.UNLIMITED else f"{most} for each process",
        )
    fix = (
        f"ulimit -n {min(4096, raisable)}"
        if raisable >= needed
        else "a higher nofile in /etc/security/limits.conf, then a new login"
    )
    return Check("open files", WARNING, f"{most} for each process, {needed} may be needed", [fix])


def ram_beside_gpus(estimate: memory.Estimate, step: StepNeeds | None, ranks: int) -> Check:
    """Training on GPUs: the host holds torch itself, and rank 0's copy of a checkpoint while it is
    written."""
    free = cgroups.available_memory()
    copy = estimate.parameters + estimate.optimizer + (step.elsewhere if step else 0)
    needed = ranks * RANK_RAM_BYTES + copy
    if free < needed:
        text = (
            f"{memory.gib(free)} free, about {memory.gib(needed)} needed beside the "
            f"GPUs{cgroups.says_who()}"
        )
        return Check(
            "host memory",
            WARNING,
            text,
            ["close other programs", "a machine or container with more memory"],
        )
    return Check(
        "host memory",
        OK,
        f"{memory.gib(free)} free, about {memory.gib(needed)} needed beside the GPUs",
    )


def port(wanted: int) -> tuple[int, Check | None]:
    """The port to use instead of a taken one, with its owner; 0 means any."""
    if not wanted or ports.is_free(wanted):
        return wanted, None
    owner, other = ports.owner(wanted), ports.next_free(wanted)
    if other is None:
        text = (
            f"port {wanted} (--master_port) is taken by {owner}; so are the next {ports.TRIES - 1}"
        )
        return wanted, Check(
            "port", ERROR, text, ["leave --master_port out: a free port is chosen"]
        )
    return other, Check(
        "port", WARNING, f"port {wanted} (--master_port) is taken by {owner}; using {other}"
    )
