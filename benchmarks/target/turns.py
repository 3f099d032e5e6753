"""Time of a step of both contenders, measured in turns on one machine: on a CPU the processor time,
on a GPU the time on the clock."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import commit, cpu
from benchmarks.target.plan import CPU, CUDA, Plan, of_nanochat
from benchmarks.target.runs import Kept, Process, read, stop
from training.core.rundir import read_json, write_json

# Steps in a turn, and before the first turn, when all is compiled. On a GPU a turn takes a second.
STEPS = {CPU: 3, CUDA: 100}
WARM = {CPU: 4, CUDA: 50}
ENDLESS = 1_000_000
POLL_S = 0.02


def file(folder: Path, plan: Plan) -> Path:
    where = "" if plan.device == CPU else f"-{plan.device}"
    return folder / f"time-{plan.baseline}{where}-{plan.precision}.json"


def kept(folder: Path, plan: Plan) -> tuple[dict[str, Any], list[list[float]]] | None:
    """(the record, milliseconds of a step of the baseline and of Duet in each round)"""
    record = read_json(file(folder, plan))
    return (record, record[_key(plan.device)]) if record else None


def _key(device: str) -> str:
    return "step_cpu_ms" if device == CPU else "step_ms"


def measure(plan: Plan, kept: Kept, count: int) -> None:
    """Write the milliseconds that each process takes for a step, a pair for each of `count` rounds.
    Neither runs while the other is measured, and both see the same load; on a CPU the time of other
    programs does not count."""
    from tqdm import tqdm  # a GPU's machine may have a stand-in only

    seed, device = plan.seeds[0], plan.device
    both = [plan.base(ENDLESS, seed, plan.rate), plan.duet(ENDLESS, seed, 1.0)]
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for training in both:
                processes.append(
                    Process(training, Path(scratch, training.contender), ENDLESS, ENDLESS)
                )
                _until(processes[-1], WARM[device])
                os.kill(processes[-1].process.pid, signal.SIGSTOP)
            rounds = []
            for number in tqdm(range(count), unit="round", disable=None):
                order = processes if number % 2 == 0 else processes[::-1]
                found = {process: _turn(process) for process in order}
                rounds.append([round(found[process], 2) for process in processes])
        finally:
            stop(processes)
    about = {"cpu": cpu(), "cores": os.cpu_count(), "torch": version("torch")}
    if device != CPU:
        about |= {"gpu": _gpu()}
    record: dict[str, object] = {"commit": commit()}
    record |= {"nanochat": kept.nanochat} if of_nanochat(plan.baseline) else {}
    kept.folder.mkdir(parents=True, exist_ok=True)
    write_json(file(kept.folder, plan), record | {"machine": about, _key(device): rounds})


def _turn(process: Process) -> float:
    device = process.training.device
    with _awake(process):
        # the first step has been interrupted, on a GPU also what was queued behind it
        first = _until(process, _steps(process) + (1 if device == CPU else WARM[device]))
        before = _cpu_s(process) if device == CPU else 0.0
        last = _until(process, first + STEPS[device])
        if device == CPU:
            return 1000 * (_cpu_s(process) - before) / (last - first)
    ends = read(process.records).time
    return 1000 * (ends[last] - ends[first]) / (last - first)


@contextmanager
def _awake(process: Process) -> Iterator[None]:
    os.kill(process.process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(process.process.pid, signal.SIGSTOP)


def _until(process: Process, steps: int) -> int:
    """Wait for that many steps; returns how many there are."""
    while (made := _steps(process)) < steps:
        if process.ended():
            raise RuntimeError(f"{process.training.name} ended after {made} steps")
        time.sleep(POLL_S)
    return made


def _steps(process: Process) -> int:
    return len(read(process.records).loss)


def _cpu_s(process: Process) -> float:
    import psutil  # a GPU's machine may have none, and needs none

    times = psutil.Process(process.process.pid).cpu_times()
    return float(times.user + times.system)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0)
