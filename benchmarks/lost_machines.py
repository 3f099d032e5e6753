"""Machine losses at random moments with `--min_ranks=1`: three launchers on this machine, of which
one after another is killed with all of its processes, and one is started again.

    python -m benchmarks.lost_machines [--runs=5] [--seed=1]

Exits with 1 unless every run finishes, the restarts have 3 → 2, 2 → 1 and 1 → 2 ranks, the training
losses are those of the untouched run (within 1e-4, since sums are computed in another order), and
no process is left.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.common import ROOT, environment
from benchmarks.losses import MARK, ROUNDING, SHAPE, losses, of_run, train
from benchmarks.recovery import CONFIG, QUIET
from training.core.rundir import RunDir, read_records
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

MACHINES, STEPS, LIMIT_S = 3, 400, 300.0
CHANGES = ([3, 2], [2, 1], [1, 2])
LENGTH = {"num_iterations": STEPS}


class Machine:
    """The launcher of one machine, marked by an environment variable with all its processes."""

    def __init__(self, number: int, folder: Path, name: str, port: int) -> None:
        self.mark = uuid.uuid4().hex
        flags = {
            **(SHAPE | QUIET | LENGTH),
            **{"out_dir": folder, "log_dir": folder / f"logs{number}", "run_name": name},
            **{"nnodes": MACHINES, "node_rank": number, "min_ranks": 1},
            **{"master_addr": LOOPBACK, "master_port": port},
        }
        self.console = folder / f"{name}.console{number}.{self.mark}"
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(
                ["./launch_train.sh", "1", CONFIG, *(f"--{k}={v}" for k, v in flags.items())],
                cwd=ROOT,
                env=environment(**{MARK: self.mark}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def kill(self) -> None:
        """As if it were switched off."""
        for pid in of_run(self.mark):
            try:
                psutil.Process(pid).kill()
            except psutil.Error:
                continue
        self.process.wait()


def until(condition: Callable[[], bool], machines: list[Machine]) -> None:
    """Raises SystemExit when node 0 ends before."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if machines[0].process.poll() is not None or time.monotonic() > end:
            sys.exit(machines[0].console.read_text()[-3000:])
        time.sleep(0.1)


def lose(folder: Path, name: str, choice: random.Random) -> tuple[RunDir, list[float]]:
    """(run, seconds from each change to the first new step)."""
    port, run = free_port(LOOPBACK), RunDir(folder / name)
    machines = [Machine(number, folder, name, port) for number in range(MACHINES)]

    def count(kind: str) -> int:
        return sum(event["event"] == kind for event in read_records(run.events))

    try:
        order, at = choice.sample(range(1, MACHINES), 2), 0
        for number, victim in enumerate(order):
            at += choice.randrange(11, 30)
            until(lambda at=at: max(losses(run), default=0) >= at, machines)  # type: ignore[misc]
            machines[victim].kill()
            until(lambda number=number: count("recovered") > number, machines)  # type: ignore[misc]
            at = max(losses(run), default=0)
        begun = time.time()
        machines[order[0]] = Machine(order[0], folder, name, port)
        until(lambda: count("recovered") == len(CHANGES), machines)
        back = next(e["time"] for e in read_records(run.events) if e.get("attempt") == 4) - begun
        codes = [m.process.wait(LIMIT_S) for n, m in enumerate(machines) if n != order[1]]
        if any(codes):
            sys.exit(f"{name}: exit {codes}\n{machines[0].console.read_text()[-3000:]}")
    finally:
        left = {pid for machine in machines for pid in of_run(machine.mark)}
        for machine in machines:
            machine.kill()
    if left:
        sys.exit(f"{name}: processes are left: {left}")
    changes = [e["ranks"] for e in read_records(run.events) if e["event"] == "restart"]
    if changes != list(CHANGES):
        sys.exit(f"{name}: ranks {changes}")
    seconds = [e["seconds"] for e in read_records(run.events) if e["event"] == "recovered"]
    return run, [*seconds, back]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    choice, rows, worst = random.Random(asked.seed), list[list[float]](), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = losses(train(folder, "whole", [], ranks=MACHINES, **LENGTH))
        for number in tqdm(range(asked.runs), disable=None):
            run, seconds = lose(folder, f"run{number}", choice)
            own = losses(run)
            if own.keys() != whole.keys():
                sys.exit(f"run{number}: not the steps of the untouched run")
            worst = max(worst, *(abs(own[s] / whole[s] - 1) for s in own))
            rows.append(seconds)
    if worst > ROUNDING:
        sys.exit(f"losses differ by {worst:.1e}")
    titles = ["3 → 2", "2 → 1", "1 → 2", "1 → 2, from the start of the launcher to the restart"]
    for title, found in zip(titles, zip(*rows, strict=True), strict=True):
        print(f"| {title} | {statistics.median(found):.1f} s ({min(found):.1f}–{max(found):.1f}) |")
    print(f"\nLargest relative difference of a training loss: {worst:.1e}; no process is left.")


if __name__ == "__main__":
    main()
