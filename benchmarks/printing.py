"""Time that rank 0 of a user script takes to print much text: under Duet, and under bare torchrun.

    python -m benchmarks.printing [--rounds=5] [--mb=100]

Two CPU ranks without torch, standard output to a file. `blocks` writes 100 KB at a time, `lines`
calls print for each line. Duet writes the text three times (the rank's log, the run's log, the
console), torchrun once. Rounds are interleaved; the time is measured in rank 0, and for the whole
command with its start. The console must have every byte.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment

SCRIPT = """
import os, sys, time
mb, how, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
line = "step 12/300 loss 2.345 lr 0.001 " + "x" * 67 + "\\n"
block = line * 1000
if os.environ["RANK"] == "0":
    began = time.perf_counter()
    if how == "blocks":
        for _ in range(10 * mb):
            sys.stdout.write(block)
    else:
        for _ in range(10_000 * mb):
            print(line, end="")
    sys.stdout.flush()
    with open(result, "w") as file:
        file.write(str(time.perf_counter() - began))
"""
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
]
HOW, WAYS = ("blocks", "lines"), ("launch_train.sh", "torchrun")


def once(way: str, how: str, mb: int) -> tuple[float, float]:
    """Seconds of rank 0, and of the command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, result = folder / "prints.py", folder / "seconds"
        script.write_text(SCRIPT)
        own = [
            f"--out_dir={folder}",
            f"--log_dir={folder}",
            "--device=cpu",
            "--report=false",
            "--script",
            str(script),
            "--",
        ]
        command = ["./launch_train.sh", "2", *own] if way == WAYS[0] else [*TORCHRUN, str(script)]
        began = time.perf_counter()
        with (folder / "console").open("wb") as out:
            subprocess.run(
                [*command, str(mb), how, str(result)],
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=out,
                check=True,
            )
        whole = time.perf_counter() - began
        with (folder / "console").open("rb") as out:
            printed = sum(len(line) for line in out if line.startswith(b"step 12/300 "))
        if printed != 1_000_000 * mb:
            raise SystemExit(f"{way}: {printed} bytes on the console instead of {1_000_000 * mb}")
        return float(result.read_text()), whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--how", choices=HOW, nargs="*", default=HOW)
    asked = parser.parse_args()
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {
        (how, way): [] for how in asked.how for way in WAYS
    }
    for _ in tqdm(range(asked.rounds), unit="round", disable=None):
        for (how, way), found in seconds.items():
            found.append(once(way, how, asked.mb))
    print(f"{asked.mb} MB{'':<20}" + "".join(f"{way:>18}" for way in WAYS) + f"{'ratio':>8}")
    for how in asked.how:
        for number, part in enumerate(("rank 0", "command")):
            duet, torchrun = (
                statistics.median(found[number] for found in seconds[how, way]) for way in WAYS
            )
            name = f"{how}, {part}"
            print(f"{name:<25}{duet:17.2f}s{torchrun:17.2f}s{duet / torchrun:8.1f}")


if __name__ == "__main__":
    main()
