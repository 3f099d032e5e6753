"""GPU losses at random moments with `--min_ranks=1`: four CPU ranks lose one after another, until
one is left.

    python -m benchmarks.losses [--losses=20] [--seed=1]

Each loss is an injected uncorrectable memory error of a random rank at a random step. Exits with 1
unless every run finishes, each restart has one rank less and continues from the newest checkpoint,
the losses are those of the untouched run (bit for bit before the first loss, within 1e-4 after it,
since sums are computed in another order), and no process is left.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.common import ROOT, environment
from benchmarks.recovery import CONFIG, QUIET
from training.core.rundir import RunDir, read_records

RANKS, STEPS, SAVE_EVERY = 4, 60, 10
SHAPE = {
    "depth": 1,
    "max_seq_len": 32,
    "device_batch_size": 4,
    "total_batch_size": 48 * 32,  # 48 sequences: for 4, 3, 2 and 1 ranks
    "num_iterations": STEPS,
    "save_every": SAVE_EVERY,
    "sample_tokens": 0,
    "log_every": 10,
    "precision": "fp32",
    "optimizer": "adamw",  # Muon would amplify the last bits
}
ROUNDING = 1e-4
MARK = "LOSSES_BENCHMARK"


@dataclass(frozen=True)
class Loss:
    ranks: int  # before
    steps: int  # repeated
    seconds: float  # from the last progress before the loss to the first new step


def moments(choice: random.Random, count: int) -> list[str]:
    """Faults of one run, for its first starts."""
    steps = sorted(choice.sample(range(2, STEPS), count))
    return [
        f"ecc@rank={choice.randrange(RANKS - n)},step={step},attempt={n + 1}"
        for n, step in enumerate(steps)
    ]


def train(folder: Path, name: str, faults: list[str], ranks: int = RANKS, **more: object) -> RunDir:
    """Raises SystemExit if the run fails, or leaves a process."""
    mark = uuid.uuid4().hex
    flags = {"out_dir": folder, "log_dir": folder, "run_name": name}
    if faults:
        flags |= {"min_ranks": 1, "rejoin": "false", "inject": ";".join(faults)}
    words = [f"--{key}={value}" for key, value in (SHAPE | QUIET | flags | more).items()]
    done = subprocess.run(
        ["./launch_train.sh", str(ranks), CONFIG, *words],
        cwd=ROOT,
        env=environment(**{MARK: mark}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{faults}: exit {done.returncode}\n{done.stderr[-3000:]}")
    if left := of_run(mark):
        sys.exit(f"{faults}: processes are left: {left}")
    return RunDir(folder / name)


def of_run(mark: str) -> list[int]:
    """The processes of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def losses(run: RunDir) -> dict[int, float]:
    """Step → loss; a repeated step has its last."""
    return {r["step"]: r["loss"] for r in read_records(run.metrics) if "loss" in r}


def compare(run: RunDir, whole: dict[int, float], faults: list[str]) -> tuple[list[Loss], float]:
    """(its losses of GPUs, the largest relative difference of a training loss). Raises
    SystemExit."""
    events: dict[str, list[dict[str, Any]]] = {"restart": [], "recovered": []}
    for event in read_records(run.events):
        events.get(event["event"], []).append(event)
    restarts, recovered = events["restart"], events["recovered"]
    ranks = [restart["ranks"] for restart in restarts]
    if ranks != [[RANKS - n, RANKS - n - 1] for n in range(len(faults))]:
        sys.exit(f"{faults}: ranks {ranks}")
    own, first = losses(run), restarts[0]["resumes_at"]
    if own.keys() != whole.keys() or any(own[s] != whole[s] for s in own if s <= first):
        sys.exit(f"{faults}: not the steps of the untouched run")
    for restart, found in zip(restarts, recovered, strict=True):
        if found["step"] != restart["resumes_at"] + 1 or restart["steps_lost"] > 2 * SAVE_EVERY:
            sys.exit(f"{faults}: {restart}, {found}")
    made = [
        Loss(restart["ranks"][0], restart["steps_lost"], found["seconds"])
        for restart, found in zip(restarts, recovered, strict=True)
    ]
    return made, max(abs(own[s] / whole[s] - 1) for s in own)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    choice, made, worst = random.Random(asked.seed), list[Loss](), 0.0
    with tempfile.TemporaryDirectory() as name, tqdm(total=asked.losses, disable=None) as bar:
        folder = Path(name)
        whole = losses(train(folder, "whole", []))
        while len(made) < asked.losses:
            faults = moments(choice, min(RANKS - 1, asked.losses - len(made)))
            found, differs = compare(train(folder, f"run{len(made)}", faults), whole, faults)
            made, worst = [*made, *found], max(worst, differs)
            bar.update(len(found))
    if worst > ROUNDING:
        sys.exit(f"losses differ by {worst:.1e}")
    print("| ranks | losses | from the loss to the first new step | steps repeated |")
    print("|---|---|---|---|")
    for ranks in range(RANKS, 1, -1):
        group = [one for one in made if one.ranks == ranks]
        if not group:
            continue
        seconds, steps = [o.seconds for o in group], [o.steps for o in group]
        print(
            f"| {ranks} → {ranks - 1} | {len(group)} | {statistics.median(seconds):.1f} s "
            f"({min(seconds):.1f}–{max(seconds):.1f}) | {statistics.mean(steps):.1f} "
            f"({min(steps)}–{max(steps)}) |"
        )
    print(f"\nLargest relative difference of a training loss: {worst:.1e}; no process is left.")


if __name__ == "__main__":
    main()
