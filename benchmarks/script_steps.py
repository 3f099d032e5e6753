"""An unchanged script under `./duet run` and under torchrun, compared with the same ranks
started by hand: time of a step, and time from the command to its first line.

    python -m benchmarks.script_steps [--rounds=7] [--steps=1500] [--ranks=2]

The script is a plain DDP loop over gloo, one thread a rank. Rounds are interleaved and start with
another way each; the ratios are those of the medians of one round.
"""

from __future__ import annotations

import argparse
import os
import socket
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
print("first line", flush=True)
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
times = []
for step in range(int(sys.argv[1])):
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - begun)
if dist.get_rank() == 0:
    print(sorted(times[20:])[len(times[20:]) // 2] * 1e3, flush=True)
dist.destroy_process_group()
# Without interpreter teardown, in which gloo's threads abort some runs; Duet does it for scripts.
os._exit(0)
"""
BY_HAND, TORCHRUN, DUET = WAYS = ("by hand", "torchrun", "duet run")


def commands(
    way: str, ranks: int, script: Path, folder: Path, steps: int
) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start, each with its own variables; the first prints the result."""
    call = [str(script), str(steps)]
    if way == TORCHRUN:
        return [
            (
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc-per-node={ranks}",
                    *call,
                ],
                {},
            )
        ]
    if way == DUET:
        folders = [f"--out_dir={folder}", f"--log_dir={folder}", "--report=false"]
        return [([str(ROOT / "duet"), "run", f"-n{ranks}", *folders, *call], {})]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        ([sys.executable, "-u", *call], same | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def measure(way: str, ranks: int, script: Path, folder: Path, steps: int) -> tuple[float, float]:
    """(median step in ms, seconds to the first line). Raises SystemExit if the script fails."""
    begun = time.perf_counter()
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(GLOO_SOCKET_IFNAME="lo") | more,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{number}.err").open("w"),
            text=True,
        )
        for number, (command, more) in enumerate(commands(way, ranks, script, folder, steps))
    ]
    assert started[0].stdout
    started[0].stdout.readline()
    first = time.perf_counter() - begun
    last = started[0].stdout.read().strip().rpartition("\n")[2]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"{way} failed:\n" + (folder / "0.err").read_text()[-2000:])
    return float(last), first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=2)
    wanted = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in tqdm(range(wanted.rounds), unit="round", disable=None):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            with tempfile.TemporaryDirectory() as place:
                script = Path(place) / "main.py"
                script.write_text(SCRIPT)
                found[way].append(measure(way, wanted.ranks, script, Path(place), wanted.steps))
    base = found[BY_HAND]
    alone_ms = statistics.median(step for step, _ in base)
    print(f"step by hand {alone_ms:.2f} ms, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':10}{'step : by hand':>26}{'first line':>12}")
    for way in WAYS:
        ratios = [step / alone for (step, _), (alone, _) in zip(found[way], base, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
        print(f"{way:10}{spread:>26}{statistics.median(first for _, first in found[way]):>10.2f} s")


if __name__ == "__main__":
    main()
