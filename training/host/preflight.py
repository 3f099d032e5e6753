"""Checks of this machine before anything starts. An error means that the run would fail; a warning, that it may."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training import rundir
from training.errors import Problem
from training.host import memory, ports
from training.host.gpus import Gpu, Machine
from training.host.torch_build import TorchBuild
from training.request import Launch

RECOMMENDED_GPU_BYTES = 20 * 10**9  # what the original configs were made for
OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Check:
    """One line of the resource report."""

    name: str
    status: str
    text: str
    fixes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def problem(self) -> Problem:
        return Problem(self.text, "", self.fixes)


def gpus(machine: Machine, estimate: memory.Estimate, request: Launch, smaller: list[str]) -> Iterable[Check]:
    """Enough GPUs, each with room for the estimate, and who is on them; `smaller`: commands for runs that fit."""
    have, ranks = len(machine.gpus), request.gpu_ranks
    if have < ranks:
        fixes = [request.command_with(have)] if have else []
        fixes += [request.command(device="cpu"), "./train_dual_gpu.sh configs/dual_gpu/quickstart.py   # two ranks on any machine"]
        yield Check("GPUs", ERROR, f"{ranks} GPUs are needed, {have} visible: {machine.reason}", fixes)
        return
    yield Check("GPUs", OK, f"{have} visible, {ranks} used; driver {machine.driver or '-'}, CUDA up to {machine.cuda or '-'}")
    for gpu in machine.gpus[:ranks]:
        yield from _gpu(gpu, estimate, smaller)


def _gpu(gpu: Gpu, estimate: memory.Estimate, smaller: list[str]) -> Iterable[Check]:
    name = f"GPU {gpu.index}"
    shown = f"{gpu.name}, {memory.gib(gpu.free_bytes)} free of {memory.gib(gpu.total_bytes)}"
    strangers = [
        f"pid {p.pid} ({p.user}, {memory.gib(p.used_bytes)}): {p.command}"
        for p in gpu.processes
        if p.pid not in (os.getpid(), os.getppid())
    ]
    occupied = "; occupied by " + ", ".join(strangers) if strangers else ""
    if gpu.free_bytes is None:
        yield Check(name, WARNING, f"{shown}: the driver does not tell the free memory{occupied}")
    elif gpu.free_bytes < estimate.needed:
        fixes = [*smaller, *(f"kill {p.pid}   # if it is yours: {p.command[:40]}" for p in gpu.processes)]
        fixes = fixes or [f"a GPU with {memory.gib(estimate.needed)} free"]
        yield Check(name, ERROR, f"{shown}: this run needs {memory.gib(estimate.needed)}{occupied}", fixes)
    elif gpu.free_bytes < estimate.tight:
        yield Check(name, WARNING, f"{shown}: tight, the run may need {memory.gib(estimate.tight)}{occupied}")
    elif strangers:
        yield Check(name, WARNING, f"{shown}{occupied}")
    else:
        small = gpu.total_bytes is not None and gpu.total_bytes < RECOMMENDED_GPU_BYTES
        yield Check(name, OK, shown + ("; 20 GB or more are recommended for the dual-GPU configs" if small else ""))


def torch_fits(machine: Machine, torch: TorchBuild | None, request: Launch) -> Iterable[Check]:
    """The installed torch can use these GPUs: built for CUDA, and not for a newer one than the driver runs."""
    if torch is None or not machine.gpus:
        return
    name = f"torch {torch.version}"
    if torch.cuda is None:
        fixes = [request.command(device="cpu"), "install a CUDA build of torch, or point TORCH_LOCAL_PATH to one"]
        yield Check("torch", ERROR, f"{name} is built for the CPU only: it can not use a GPU", fixes)
    elif machine.cuda and int(machine.cuda.split(".")[0]) < int(torch.cuda.split(".")[0]):
        text = f"{name} is built for CUDA {torch.cuda}; driver {machine.driver} runs CUDA up to {machine.cuda}"
        yield Check("torch", ERROR, text, ["update the NVIDIA driver", f"install a torch built for CUDA {machine.cuda.split('.')[0]}"])
    else:
        yield Check("torch", OK, f"{name}, CUDA {torch.cuda}")


def compile_works(torch: TorchBuild | None, device: str, request: Launch) -> list[Check]:
    """torch's code generator for CPUs builds a shell command without quoting its own folder."""
    if device != "cpu" or torch is None or not re.search(r"[\s'\"]", torch.folder):
        return []
    text = f"torch.compile on a CPU fails when torch is in a folder with a space or quote, as here: {torch.folder}"
    return [Check("compile", ERROR, text, [request.command(compile=0)])]


def not_running(run: rundir.RunDir) -> list[Check]:
    """The run to resume has ended: two supervisors in one run directory would overwrite each other."""
    import psutil

    facts = rundir.read_json(run.supervisor) or {}
    pid = facts.get("pid")
    if pid is None or facts.get("host") != socket.gethostname() or not psutil.pid_exists(pid):
        return []
    try:
        if str(run.path) not in psutil.Process(pid).cmdline():
            return []  # the number belongs to another process by now
    except psutil.Error:
        return []
    return [
        Check(
            "run",
            ERROR,
            f"{run.name} is still running (pid {pid})",
            [f"./monitor_training.sh --run={shlex.quote(str(run.path))}", f"kill {pid}"],
        )
    ]


def host_memory(room: int | None, estimate: memory.Estimate, request: Launch, smaller: list[str]) -> Check:
    """Training on the CPU: the ranks live in host memory."""
    ranks = request.local_ranks
    shown = f"{memory.gib(room)} free for each of {ranks} ranks" if ranks > 1 else f"{memory.gib(room)} free"
    if room is not None and room < estimate.needed:
        return Check("host memory", ERROR, f"{shown}: this run needs {memory.gib(estimate.needed)} per rank", smaller)
    if room is not None and room < estimate.tight:
        return Check("host memory", WARNING, f"{shown}: tight, this run may need {memory.gib(estimate.tight)} per rank")
    return Check("host memory", OK, f"{shown}, {memory.gib(estimate.needed)} needed")


def folder(name: str, path: Path, flag: str, needed: int, origin: str) -> Check:
    """The folder (or the nearest parent that is there) takes files, and the disk has room. Leaves nothing behind."""
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
        return Check(f"{name} folder", ERROR, f"{shown} can not be written: {error.strerror}", fixes)
    free = shutil.disk_usage(there).free
    if free < needed:
        return Check(f"{name} folder", ERROR, f"{shown}: {memory.gib(free)} free, {memory.gib(needed)} needed", fixes)
    return Check(f"{name} folder", OK, f"{path}: {memory.gib(free)} free")


def shared_memory(num_workers: int, ranks: int) -> Check | None:
    """Data-loader workers hand batches over through /dev/shm."""
    if not num_workers or not os.path.isdir("/dev/shm"):
        return None
    free, needed = shutil.disk_usage("/dev/shm").free, num_workers * ranks * (64 << 20)
    if free < needed:
        return Check("/dev/shm", WARNING, f"{memory.gib(free)} free for {num_workers * ranks} workers", ["--num_workers=0"])
    return Check("/dev/shm", OK, f"{memory.gib(free)} free")


def port(wanted: int) -> tuple[int, Check | None]:
    """The port to use instead of a taken one, with its owner; 0 means any."""
    if not wanted or ports.is_free(wanted):
        return wanted, None
    owner, other = ports.owner(wanted), ports.next_free(wanted)
    if other is None:
        text = f"port {wanted} (--master_port) is taken by {owner}; so are the next {ports.TRIES - 1}"
        return wanted, Check("port", ERROR, text, ["leave --master_port out: a free port is chosen"])
    return other, Check("port", WARNING, f"port {wanted} (--master_port) is taken by {owner}; using {other}")


MARKS = {OK: "ok     ", WARNING: "warning", ERROR: "error  "}


def table(records: list[dict[str, Any]]) -> str:
    """The resource report, a line a check."""
    width = max(len(r["name"]) for r in records)
    return "".join(f"  {MARKS[r['status']]}  {r['name']:<{width}}  {r['text']}\n" for r in records)


def main() -> int:
    """`python lib/run_module.py training.host.preflight RUN_DIR`: print the report that the plan made."""
    from training import console

    if log := os.environ.get(console.LOG_VARIABLE):
        console.open_log(log)
    found = rundir.read_json(rundir.RunDir(sys.argv[1]).preflight) or {"checks": []}
    console.info("resource check\n" + table(found["checks"]).rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
