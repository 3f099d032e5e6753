"""Cost of gradient exchange with gloo: a DDP step on two CPU ranks with different bucket sizes and
compression, against no exchange.

    python -m benchmarks.gloo [--shapes=small,big] [--precision=bf16|fp32] [--rounds=5] [--steps=20]

One thread per rank. All variants run in the same two processes, in interleaved rounds, so that
conditions are equal; AdamW, since shared Muon adds its own exchange. 'no exchange' is no_sync(),
the result of a perfect overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from benchmarks.common import ROOT, environment, prepared
from benchmarks.peers import SHAPES
from training.host import allocator
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

RANKS = 2
ALONE = "no exchange"


def variants() -> dict[str, tuple[dict[str, Any], Callable[[Any], None]]]:
    """name → (arguments of DDP, function applied to the module)."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    def nothing(model: Any) -> None:
        pass

    def compressed(hook: Any) -> Callable[[Any], None]:
        return lambda model: model.register_comm_hook(None, hook)

    view = {"gradient_as_bucket_view": True}
    return {
        ALONE: (view, nothing),
        "Duet's default (25 MB, views)": (view, nothing),
        "no views": ({}, nothing),
        "buckets of 1 MB": (view | {"bucket_cap_mb": 1}, nothing),
        "buckets of 5 MB": (view | {"bucket_cap_mb": 5}, nothing),
        "one bucket": (view | {"bucket_cap_mb": 1000}, nothing),
        "static graph": (view | {"static_graph": True}, nothing),
        "fp16 compression": (view, compressed(hooks.fp16_compress_hook)),
    }


def rank(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.contenders import parts

    allocator.keep_freed_memory()  # as in a Duet run
    dist.init_process_group("gloo")
    work = parts.Job(**job["work"])
    batches = parts.Steps(work)
    made = {}
    for name, (arguments, prepare) in variants().items():
        torch.manual_seed(0)
        model = DistributedDataParallel(parts.model(work), **arguments)
        prepare(model)
        made[name] = (model, parts.optimizer(model), list(model.parameters()))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=work.bf16)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(job["rounds"] + 1):  # the first one warms up
        for name, (model, optimizer, parameters) in made.items():
            dist.barrier()
            laps = []
            for step in range(job["steps"]):
                started = time.perf_counter()
                inputs, targets = batches[step * RANKS + dist.get_rank()]
                with model.no_sync() if name == ALONE else nullcontext():
                    with autocast:
                        loss = model(inputs, targets)
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, parts.CLIP)
                optimizer.step()
                optimizer.zero_grad()
                laps.append(1000 * (time.perf_counter() - started))
            if number:
                times[name].append(statistics.median(laps))
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def measure(
    shape: str, precision: str, rounds: int, steps: int, data: Any
) -> dict[str, list[float]]:
    """name → median milliseconds per step of each round."""
    size = SHAPES[shape]
    work = {
        "depth": size.depth,
        "seq_len": size.seq_len,
        "batch": size.batch,
        "precision": precision,
        "steps": steps * RANKS,
    }
    work |= {"vocab": data.vocab, "shard": str(data.train[0])}
    job = json.dumps({"work": work, "rounds": rounds, "steps": steps})
    rendezvous = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gloo", "--rank", job],
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
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="small,big")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank:
        rank(json.loads(wanted.rank))
        return
    data = prepared()
    for shape in wanted.shapes.split(","):
        times = measure(shape, wanted.precision, wanted.rounds, wanted.steps, data)
        print(f"\n{shape}, {wanted.precision}: {SHAPES[shape]} on each of {RANKS} ranks")
        print(f"{'':<32}{'ms/step':>9}{'min':>8}{'max':>8}{'against no exchange':>21}")
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times[ALONE], strict=True))
            print(
                f"{name:<32}{statistics.median(own):9.2f}{min(own):8.2f}{max(own):8.2f}{ratio:21.3f}"
            )


if __name__ == "__main__":
    main()
