"""Cheap checks before every start for problems that would end the run or slow it down."""

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
NCCL_SHM_BYTES = 256 << 20  # without peer-to-peer copies; containers get 64 MiB by default
RANK_FILES, WORKER_FILES = 256, 32
# a few cores: two of them compute the quickstart's 1.5e13 operations in a minute
CPU_FLOPS, PATIENCE_S = (
    1e11,
    600,
)
RANK_RAM_BYTES = 2 << 30  # torch with CUDA, an estimate


def on_cpu(request: LaunchRequest, step: StepNeeds | None) -> list[str]:
    """The command of the same run on the CPU; [] if it would take hours."""
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
    """Enough GPUs, each with memory for the estimate, and the processes on them. `smaller`:
    commands of runs that fit."""
    have, ranks = len(machine.gpus), request.gpu_ranks
    if have < ranks:
        parts = (
            ["list whole GPUs in CUDA_VISIBLE_DEVICES: MIG instances are not counted"]
            if "MIG-" in machine.reason
            else []
        )
        fixes = [*parts, *([request.command_with(have)] if have else [])]
        anywhere = "two ranks on any machine"
        fixes += [
            *on_cpu(request, step),
            f"./train_dual_gpu.sh configs/dual_gpu/quickstart.py   # {anywhere}",
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
    others = [p for p in gpu.processes if p.pid not in (os.getpid(), os.getppid())]
    listed = [f"pid {p.pid} ({p.user}, {memory.gib(p.used_bytes)}): {p.command}" for p in others]
    occupied = f"; occupied by {', '.join(listed)}" if others else ""
    yours = [f"if it is yours: {p.command[:40]}" for p in others]
    kill = [f"kill {p.pid}   # {text}" for p, text in zip(others, yours, strict=True)]
    if gpu.compute_mode == PROHIBITED or (gpu.compute_mode == EXCLUSIVE and others):
        why = (
            "no process may use it"
            if gpu.compute_mode == PROHIBITED
            else f"only one process may use it{occupied}"
        )
        fixes = [*(kill if others else []), f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"]
        yield Check(name, ERROR, f"{shown}: its compute mode is '{gpu.compute_mode}', {why}", fixes)
    elif gpu.free_bytes is None:
        yield Check(
            name, WARNING, f"{shown}: the driver does not report free memory{occupied}", kill
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
    elif others:
        yield Check(name, WARNING, f"{shown}{occupied}", kill)
    else:
        small = gpu.total_bytes is not None and gpu.total_bytes < RECOMMENDED_GPU_BYTES
        text = f"{shown}; 20 GB or more are recommended for the dual-GPU configs"
        yield Check(name, OK, text if small else shown)
    if gpu.mig:
        text = (
            "split by MIG: a rank gets one instance and only its memory; no peer-to-peer copies "
            "between instances"
        )
        yield Check(f"{name} parts", WARNING, text, [f"sudo nvidia-smi -i {gpu.index} -mig 0"])


def torch_fits(
    machine: GpuInventory,
    torch: TorchBuild | None,
    request: LaunchRequest,
    step: StepNeeds | None = None,
) -> Iterable[Check]:
    """The installed torch can use these GPUs: built for CUDA, and for a version that the driver
    supports."""
    if torch is None or not machine.gpus:
        return
    name = f"torch {torch.version}"
    if torch.cuda is None:
        fixes = [
            *on_cpu(request, step),
            "install a CUDA build of torch, or set TORCH_LOCAL_PATH to one",
        ]
        yield Check("torch", ERROR, f"{name} is built for the CPU only and cannot use GPUs", fixes)
    elif machine.cuda and int(machine.cuda.split(".")[0]) < int(torch.cuda.split(".")[0]):
        text = (
            f"{name} is built for CUDA {torch.cuda}; driver {machine.driver} supports CUDA up to "
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
    """torch.compile for CPUs builds a shell command without quoting the path of torch."""
    if device != "cpu" or torch is None or not re.search(r"[\s'\"]", torch.folder):
        return []
    text = f"torch.compile on a CPU fails if the path of torch has a space or quote: {torch.folder}"
    return [Check("compile", ERROR, text, [request.command(compile=0)])]


def not_running(run: rundir.RunDir) -> list[Check]:
    """The run to resume is not running: two supervisors would overwrite each other's files."""
    facts = rundir.read_json(run.supervisor) or {}
    pid = facts.get("pid")
    if pid is None or facts.get("host") != socket.gethostname():
        return []
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    if os.fsencode(run.path) not in words:
        return []  # the pid belongs to another process now
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
    """Host memory for training on the CPU."""
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
    """The folder (or its nearest existing parent) is writable, and the disk has room. Leaves no
    files."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    shown = f"log folder {path} ({origin})" if name == "log" else f"run folder {path} ({origin})"
    fixes = [f"--{flag}=/another/folder"]
    if not there.is_dir():
        return Check(f"{name} folder", ERROR, f"{shown}: {there} is not a folder", fixes)
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Check(f"{name} folder", ERROR, f"{shown} is not writable: {error.strerror}", fixes)
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
    """Room in /dev/shm, used by data-loader workers, and by NCCL without peer-to-peer copies."""
    workers = num_workers * ranks
    nccl = nccl and ranks > 1
    if not (workers or nccl) or not os.path.isdir("/dev/shm"):
        return None
    free, needed = (
        shutil.disk_usage("/dev/shm").free,
        max(workers * WORKER_SHM_BYTES, NCCL_SHM_BYTES if nccl else 0),
    )
    if free < needed:
        users = units.plural(workers, "worker")
        if nccl:
            between = f"NCCL between {ranks} ranks"
            users = f"{users} and {between}" if workers else between
        container = "in a container"
        fixes = [
            f"docker run --shm-size=8g …   # {container}",
            "sudo mount -o remount,size=8g /dev/shm",
        ]
        return Check(
            "/dev/shm",
            WARNING,
            f"{memory.gib(free)} free for {users}",
            (["--num_workers=0"] if workers else []) + fixes,
        )
    return Check("/dev/shm", OK, f"{memory.gib(free)} free")


def cpu(num_workers: int, ranks: int, command_with: Callable[[int], str]) -> Check:
    """A core for each rank and worker. `command_with`: the user's command for a number of ranks."""
    cores, workers = env_vars.cpu_count(), num_workers * ranks
    machine = os.cpu_count() or cores
    shown = f"{cores} of {machine} cores" if machine != cores else units.plural(cores, "core")
    users = units.plural(ranks, "rank")
    if workers:
        users = f"{users} and {units.plural(workers, 'worker')}"
    if ranks > cores:
        text = f"{ranks} ranks share {units.plural(cores, 'CPU core')}: slow"
        return Check("CPU", WARNING, text, [command_with(cores)])
    if workers > cores:
        return Check(
            "CPU",
            WARNING,
            f"{shown} for {users}: more workers than cores",
            [f"--num_workers={max(0, cores // ranks - 1)}"],
        )
    return Check("CPU", OK, f"{shown} for {users}")


def open_files(num_workers: int, ranks: int) -> Check:
    """The limit of open files: a rank with torch, data and trackers opens some hundred, the
    supervisor several per rank."""
    most, raisable = cgroups.open_files()
    needed = max(RANK_FILES + WORKER_FILES * num_workers, 64 + 8 * ranks)
    if most >= needed:
        return Check(
            "open files",
            OK,
            "no limit" if most >= cgroups.UNLIMITED else f"{most} per process",
        )
    fix = (
        f"ulimit -n {min(4096, raisable)}"
        if raisable >= needed
        else "raise nofile in /etc/security/limits.conf, then log in again"
    )
    return Check("open files", WARNING, f"{most} per process, {needed} may be needed", [fix])


def ram_beside_gpus(estimate: memory.Estimate, step: StepNeeds | None, ranks: int) -> Check:
    """Host memory for training on GPUs: torch, and rank 0's copy of a checkpoint during a save."""
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
            ["close other programs", "use a machine or container with more memory"],
        )
    return Check(
        "host memory",
        OK,
        f"{memory.gib(free)} free, about {memory.gib(needed)} needed beside the GPUs",
    )


def port(wanted: int) -> tuple[int, Check | None]:
    """The master port, or the next free one if it is in use. 0: any."""
    if not wanted or ports.is_free(wanted):
        return wanted, None
    owner, other = ports.owner(wanted), ports.next_free(wanted)
    if other is None:
        text = (
            f"port {wanted} (--master_port) is taken by {owner}; so are the next {ports.TRIES - 1}"
        )
        return wanted, Check("port", ERROR, text, ["omit --master_port: a free port is chosen"])
    return other, Check(
        "port", WARNING, f"port {wanted} (--master_port) is taken by {owner}; using {other}"
    )
