"""False alarms: healthy runs that sometimes look stuck, with the shortest hang limit. Each verdict
is a false alarm.

    python -m benchmarks.false_alarms [--minutes=20] [--seed=1] [--floor=3]
                                      [--busy=N [--what=training]]

Repeats runs on two CPU ranks until the time is up: Duet trainings with slow first steps,
evaluations, checkpoints, disks and epoch switches with data-loader workers, and scripts that are
silent for long, or whose rank 0 evaluates or uploads alone. In half of them other processes keep
every core busy.

`--busy=N`: an overloaded machine instead. N processes spin all the time; the runs are the unchanged
quickstart, alternately with its own limit (60 s) and with 10 s, and every fifth run is a script;
--what selects one kind. No delays are injected.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.core.rundir import RunDir, read_records

CONFIG = "configs/dual_gpu/quickstart.py"
SCRIPT = "tests/e2e/scripts/faulty.py"
SHAPE = {
    "depth": 1,
    "max_seq_len": 32,
    "device_batch_size": 4,
    "total_batch_size": 256,
    "device": "cpu",
    "use_dummy_wandb": "true",
    "report": "false",
}
PARAGRAPH = "def word(n):\n    return 'the quick brown fox jumps over the lazy dog'[n % 40:]\n"
BUSY = "while True: pass"


def training(folder: Path, chance: random.Random, floor: float) -> list[str]:
    """A run of about a minute: short epochs, and delays above the limit where they are legal."""
    text = folder / "text.txt"
    text.write_text(PARAGRAPH * 400)
    delay = chance.uniform(1.2, 3.0) * floor
    slow = [
        f"slow@rank={chance.randrange(2)},step=1,phase=forward,seconds={delay:.1f}",
        f"slow@rank={chance.randrange(2)},phase=evaluation,"
        f"call={chance.randint(1, 4)},seconds={delay:.1f}",
        f"slow@rank=0,phase=checkpoint,call={chance.randint(1, 3)},seconds={delay:.1f}",
        f"slow@rank={chance.randrange(2)},phase=gather "
        f"state,call={chance.randint(1, 3)},seconds={delay:.1f}",
        f"slow@rank={chance.randrange(2)},phase=building the model,seconds={delay:.1f}",
    ]
    flags = {
        "data": text,
        "num_iterations": 1500,
        "save_every": 200,
        "eval_every": 150,
        "eval_tokens": 2048,
        "sample_tokens": 64,
    }
    flags |= {
        "num_workers": chance.choice((0, 1)),
        "hang_timeout": f"{floor:g}",
        "inject": ";".join(slow),
    }
    return [
        "./launch_train.sh",
        "2",
        CONFIG,
        *(f"--{name}={value}" for name, value in (SHAPE | flags).items()),
    ]


def script(chance: random.Random, floor: float) -> list[str]:
    what, seconds = chance.choice((("quiet", 8), ("slow_eval", 5), ("upload", 5), ("ok", 1)))
    return [
        "./launch_train.sh",
        "2",
        f"--hang_timeout={floor:g}",
        "--script",
        SCRIPT,
        "--",
        what,
        f"{seconds * floor:g}",
    ]


def quickstart(number: int, chance: random.Random, what: str) -> tuple[list[str], str]:
    """The first command of the README, or a script."""
    floor = "60" if number % 2 else "10"
    if what == "scripts" or (what == "both" and number % 5 == 4):
        return [
            "./launch_train.sh",
            "2",
            f"--hang_timeout={floor}",
            "--script",
            SCRIPT,
            "--",
            chance.choice(("ok", "slow_eval")),
            "30",
        ], floor
    return [
        "./train_dual_gpu.sh",
        CONFIG,
        "--device=cpu",
        f"--hang_timeout={floor}",
        "--report=false",
        "--use_dummy_wandb=true",
    ], floor


def spinning(count: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]


def watched(
    command: list[str], folder: Path, busy: bool, limit_s: float | None = None
) -> tuple[RunDir, int, str]:
    """(run, exit status, standard error) of a command; after `limit_s` it is stopped, with status
    0."""
    at = command.index("--script") if "--script" in command else len(command)
    own = [f"--out_dir={folder}", f"--log_dir={folder}", "--run_name=run"]
    neighbours = spinning(os.cpu_count() or 1) if busy else []
    try:
        with subprocess.Popen(
            [*command[:at], *own, *command[at:]],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                _, errors = process.communicate(timeout=limit_s)
                status = process.returncode
            except subprocess.TimeoutExpired:
                process.terminate()
                _, errors = process.communicate()
                status = 0
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    return RunDir(folder / "run"), status, errors


def one(
    number: int, chance: random.Random, floor: float, overloaded: str, left_s: float
) -> tuple[Counter[str], str | None]:
    """(event counts of a run, its log if it was a false alarm)."""
    with tempfile.TemporaryDirectory() as place:
        if overloaded:
            (command, own_floor), busy = quickstart(number, chance, overloaded), False
        else:
            duet, busy = chance.random() < 0.7, chance.random() < 0.5
            command, own_floor = (
                (training(Path(place), chance, floor) if duet else script(chance, floor)),
                f"{floor:g}",
            )
        run, status, errors = watched(command, Path(place), busy, left_s if overloaded else None)
        events = Counter(record["event"] for record in read_records(run.events))
        counts = Counter(
            {
                "runs of scripts" if "--script" in command else "runs of Duet's training": 1,
                f"runs at {own_floor} s": 1,
                "with busy cores": int(busy or bool(overloaded)),
                "steps": sum("loss" in record for record in read_records(run.metrics)),
                "injected delays": events["injected"],
                "evaluations": events["eval"],
                "checkpoints": events["checkpoint"],
                "epochs": events["shards"],
                "warnings": errors.count("[WARNING]"),
                "verdicts": events["verdict"],
            }
        )
        story = (
            f"exit {status}: {' '.join(command)}\n{errors[-3000:]}"
            if status or events["verdict"]
            else None
        )
        for line in errors.splitlines() if overloaded else ():
            if "[WARNING]" in line or "[ERROR]" in line:
                print(line, flush=True)
        return counts, story


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--floor", type=float, default=3.0, help="--hang_timeout of the runs, seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        help="processes that spin all the time; the runs then have fixed limits",
    )
    parser.add_argument(
        "--what", choices=("both", "training", "scripts"), default="both", help="with --busy"
    )
    wanted = parser.parse_args()
    chance, counts, alarms = random.Random(wanted.seed), Counter[str](), []
    began, number = time.monotonic(), 0
    neighbours = spinning(wanted.busy)
    try:
        with tqdm(total=round(60 * wanted.minutes), unit="s", disable=None) as bar:
            while (spent := time.monotonic() - began) < 60 * wanted.minutes:
                found, story = one(
                    number,
                    chance,
                    wanted.floor,
                    wanted.what if neighbours else "",
                    60 * wanted.minutes - spent,
                )
                number += 1
                counts.update(found)  # zeros too
                alarms += [story] if story else []
                bar.update(round(time.monotonic() - began - spent))
                if wanted.busy:  # a run takes minutes here
                    shown = ", ".join(f"{value} {name}" for name, value in counts.items() if value)
                    print(
                        f"{(time.monotonic() - began) / 60:.1f} min: {shown}, {len(alarms)} alarms",
                        flush=True,
                    )
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    for name, value in counts.items():
        print(f"{name:<24}{value}")
    print(f"{'minutes':<24}{(time.monotonic() - began) / 60:.1f}")
    print(f"{'false alarms':<24}{len(alarms)}")
    for alarm in alarms:
        print(alarm)
    sys.exit(bool(alarms))


if __name__ == "__main__":
    main()
