"""Check of one GPU before a start: its compute mode, its free memory, and who uses it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from training.core.messages import msg
from training.host import gpu_processes, gpu_words
from training.host.gpu_processes import MPS, MUCH, SOME, GpuProcess
from training.host.gpus import EXCLUSIVE, PROHIBITED, Gpu
from training.plan.preflight.report import ERROR, OK, WARNING, Check
from training.tasks import memory

RECOMMENDED_BYTES = 20 * 10**9  # what the original configs were made for
LISTED = 3  # displays
ROOT = "root"


def check(
    gpu: Gpu,
    estimate: memory.Estimate,
    smaller: list[str],
    launch: set[int],
    elsewhere: Sequence[str] = (),
    *,
    measured: bool,
) -> Check:
    """`smaller`: commands for when the memory of the GPU is too small. `launch`: its pids.
    `elsewhere`: the command for idle GPUs.
    `measured`: a step is, after these checks; what it may need is then in that check alone."""
    name = f"GPU {gpu.index}"
    shown = _shown(gpu)
    others = [
        p for p in gpu.processes if not (p.known and p.pid in launch) and MPS not in p.command
    ]
    kill = [*elsewhere, *_kill(p for p in others if p.known)]
    occupied = msg("plan.gpus.occupied", processes=_listed(others)) if others else ""
    taken = bool(others) and not gpu.by_mps
    if gpu.compute_mode == PROHIBITED or (gpu.compute_mode == EXCLUSIVE and taken):
        why = (
            msg("plan.gpus.prohibited")
            if gpu.compute_mode == PROHIBITED
            else msg("plan.gpus.exclusive", occupied=occupied)
        )
        mode = gpu_words.compute_mode(gpu.compute_mode)
        text = msg("plan.gpus.compute_mode", shown=shown, mode=mode, why=why)
        return Check(name, ERROR, text, [*kill, f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"])
    if drawing := _drawing(gpu, estimate):
        occupied += msg("plan.gpus.drawn", processes=_listed(drawing))
        kill += _kill(filter(_may_end, drawing))
    if gpu.free_bytes is None:
        text = msg("plan.gpus.free_unknown", shown=shown, occupied=occupied)
        return Check(name, WARNING, text, kill)
    needed, tight = memory.gib(estimate.needed), memory.gib(estimate.tight)
    if gpu.free_bytes < estimate.needed:
        text = msg("plan.gpus.needs", shown=shown, needed=needed, occupied=occupied)
        fixes = [*kill, *smaller] or [msg("plan.gpus.with_free", needed=needed)]
        return Check(name, ERROR, text, fixes)
    if gpu.free_bytes < estimate.tight:
        text = (
            msg("plan.gpus.tight_step", shown=shown, occupied=occupied)
            if measured
            else msg("plan.gpus.tight", shown=shown, tight=tight, occupied=occupied)
        )
        return Check(name, WARNING, text, kill)
    if occupied:
        return Check(name, WARNING, f"{shown}{occupied}", kill)
    small = gpu.total_bytes is not None and gpu.total_bytes < RECOMMENDED_BYTES
    return Check(name, OK, msg("plan.gpus.recommended", shown=shown) if small else shown)


def _drawing(gpu: Gpu, estimate: memory.Estimate) -> list[GpuProcess]:
    """The largest displays, if they have much memory, or some where little is left."""
    held, least = [one.used_bytes for one in gpu.displays], MUCH
    if gpu.free_bytes is not None and gpu.free_bytes < estimate.tight:
        wanted = estimate.needed if gpu.free_bytes < estimate.needed else estimate.tight
        least = 0 if None in held else min(SOME, wanted - gpu.free_bytes)
    if sum(filter(None, held)) < least:
        return []
    return sorted(gpu.displays, key=lambda one: -(one.used_bytes or 0))[:LISTED]


def _may_end(display: GpuProcess) -> bool:
    """Whether its user may end it for its memory, without the end of the desktop."""
    own = display.known and display.user == gpu_processes.here(os.getpid()).user != ROOT
    much = (display.used_bytes or 0) >= MUCH
    return own and much and not gpu_processes.is_desktop(display.command)


def _kill(some: Iterable[GpuProcess]) -> list[str]:
    yours = [(p.pid, msg("plan.gpus.if_yours", command=p.command[:40])) for p in some]
    return [f"kill {pid}   # {text}" for pid, text in yours]


def _shown(gpu: Gpu) -> str:
    """Its name, and as much of its memory as the driver reports."""
    free, total = gpu.free_bytes, gpu.total_bytes
    if free is not None and total is not None:
        return msg(
            "plan.gpus.memory", name=gpu.name, free=memory.gib(free), total=memory.gib(total)
        )
    known = [] if free is None else [msg("plan.memory.free", room=memory.gib(free))]
    known += [] if total is None else [memory.gib(total)]
    return msg("plan.word.comma").join([gpu.name, *known])


def _listed(some: Iterable[GpuProcess]) -> str:
    return ", ".join(map(_described, some))


def _described(one: GpuProcess) -> str:
    used = memory.gib(one.used_bytes)
    if not one.known:
        return msg("plan.gpus.host_process", pid=one.pid, used=used)
    return msg("plan.gpus.process", pid=one.pid, user=one.user, used=used, command=one.command)
