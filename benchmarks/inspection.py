"""Cost of the inspector in a hand-written DDP loop on two CPU ranks: the same step with and without
it.

    python -m benchmarks.inspection [--rounds=15] [--steps=100] [--width=512]

One thread per rank; both loops run in the same two processes in interleaved rounds, so that
conditions are equal. The inspector compares the ranks every 100 steps, its default; each round
includes one comparison. Also printed: the time within inspector.step(), and the CPU time of rank 0,
including the inspector's thread and hooks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import ROOT, environment
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

RANKS, BATCH = 2, 32


def rank(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from training.inspector import DDPInspector

    dist.init_process_group("gloo")
    width = job["width"]
    data = TensorDataset(torch.randn(job["steps"] * BATCH * RANKS, width))
    loops = {}
    for name in ("without", "with"):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            torch.nn.Sequential(
                *(torch.nn.Linear(width, width) for _ in range(4)), torch.nn.Linear(width, 1)
            )
        )
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
        inspector = DDPInspector(model, loader) if name == "with" else None
        loops[name] = (model, loader, torch.optim.AdamW(model.parameters()), inspector)
    times: dict[str, list[list[float]]] = {name: [] for name in loops}
    for number in range(job["rounds"] + 1):  # the first one warms up
        names = list(loops) if number % 2 else list(loops)[::-1]
        for name in names:
            model, loader, optimizer, inspector = loops[name]
            dist.barrier()
            within = 0.0
            started, worked = time.perf_counter(), time.process_time()
            for (batch,) in loader:
                optimizer.zero_grad()
                loss = (model(batch) - 1).square().mean()
                loss.backward()
                optimizer.step()
                if inspector:
                    before = time.perf_counter()
                    inspector.step(loss, batch)
                    within += time.perf_counter() - before
            if number:
                spent = (time.perf_counter() - started, time.process_time() - worked, within)
                times[name].append([1000 * seconds / job["steps"] for seconds in spent])
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank:
        rank(json.loads(wanted.rank))
        return
    job = json.dumps({"rounds": wanted.rounds, "steps": wanted.steps, "width": wanted.width})
    rendezvous = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "benchmarks.inspection", "--rank", job]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(RANK=str(n), LOCAL_RANK=str(n), **rendezvous),
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(RANKS)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit(f"a rank failed: {[process.returncode for process in ranks]}")
    times = json.loads(outputs[0].splitlines()[-1])
    for at, what in enumerate(("time", "processor time")):
        own = {name: [row[at] for row in rows] for name, rows in times.items()}
        for name, values in own.items():
            print(
                f"{what}, {name}: {statistics.median(values):.3f} ms/step, {min(values):.3f} … "
                f"{max(values):.3f}"
            )
        ratios = [a / b for a, b in zip(own["with"], own["without"], strict=True)]
        low, high = statistics.quantiles(ratios, n=4)[::2]
        print(
            f"{what}, with / without: median {statistics.median(ratios):.4f}, middle half "
            f"{low:.4f} … {high:.4f}, of {len(ratios)} rounds"
        )
    share = statistics.median(row[2] / row[0] for row in times["with"])
    print(
        f"within inspector.step(): {1000 * statistics.median(row[2] for row in times['with']):.0f} "
        f"us a step, {share:.2%} of it"
    )


if __name__ == "__main__":
    main()
