"""Processor time of a step of both contenders, measured in turns on one machine."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.gpu.machine import commit, cpu
from benchmarks.target.plan import Plan
from benchmarks.target.runs import Process, read, stop
from training.core.rundir import write_json

STEPS, WARM = 3, 4
ENDLESS = 1_000_000
POLL_S = 0.02
FILE = "time-{}-{}.json"


def measure(plan: Plan, folder: Path, count: int) -> None:
    """Write the milliseconds of processor time that each process takes for a step, a pair for each
    of `count` rounds. Neither runs while the other is measured, and both see the same load; the
    time of other programs does not count."""
    seed = plan.seeds[0]
    both = [plan.base(ENDLESS, seed, plan.rate), plan.duet(ENDLESS, seed, 1.0)]
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for training in both:
                processes.append(
                    Process(training, Path(scratch, training.contender), ENDLESS, ENDLESS)
                )
                _until(processes[-1], WARM)
                os.kill(processes[-1].process.pid, signal.SIGSTOP)
            rounds = []
            for number in tqdm(range(count), unit="round", disable=None):
                order = processes if number % 2 == 0 else processes[::-1]
                found = {process: _turn(process) for process in order}
                rounds.append([round(found[process], 1) for process in processes])
        finally:
            stop(processes)
    about = {"cpu": cpu(), "cores": os.cpu_count(), "torch": version("torch")}
    record = {"commit": commit(), "machine": about, "step_cpu_ms": rounds}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE.format(plan.baseline, plan.precision), record)


def _turn(process: Process) -> float:
    with _awake(process):
        first = _until(process, _steps(process) + 1)
        before = _cpu_s(process)
        last = _until(process, first + STEPS)
        return 1000 * (_cpu_s(process) - before) / (last - first)


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
    times = psutil.Process(process.process.pid).cpu_times()
    return float(times.user + times.system)
