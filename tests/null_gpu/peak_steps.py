"""Peak memory of training steps on the null GPU: `peak_steps.py STORE RANK RANKS LOADS`, LOADS a JSON
list of training.tasks.gpt.memory.StepWorkload. As the trainer: several ranks under DDP, one without
it. Rank 0 writes one JSON object a load: the bytes that torch's allocator counts, allocated and
reserved."""

from __future__ import annotations

import datetime
import gc
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.config.schema import Config
from training.tasks.gpt import fp8, optim
from training.tasks.gpt.fake_memory import half_precision
from training.tasks.gpt.memory import StepWorkload
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import blocks_per_graph
from training.trainer import compression

STEPS = 4
# NCCL keeps exchanged tensors until its watchdog has seen the end, which looks every 100 ms; a step
# on a real GPU takes longer.
STEP_S = 0.3


def peak(load: StepWorkload, rank: int) -> dict[str, int]:
    with torch.device("cuda", rank):
        frugal = MemorySavings(load.blocks, load.chunks, load.selective)
        model = GPT(load.shape, frugal, load.dropout)
        tokens = torch.zeros(load.sequences, load.seq_len, dtype=torch.int64)
    if load.fp8:
        fp8.convert(model.blocks, load.tokens)
    optimizer = optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))
    # The other ranks only take part in the exchange.
    if load.compiled and rank == 0:
        model.compile_parts(blocks_per_graph("cuda", load.ranks))
    parallel: nn.Module = model
    if load.ranks > 1:
        parallel = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
        if load.compressed:
            compression.register(parallel)
    accumulation = max(1, load.total_tokens // (load.tokens * load.ranks))
    peaks = []
    for _ in range(STEPS):
        time.sleep(STEP_S)
        torch.cuda.reset_peak_memory_stats()
        for micro in range(accumulation):
            last = micro == accumulation - 1 or not isinstance(parallel, DistributedDataParallel)
            with nullcontext() if last else parallel.no_sync():
                with torch.autocast("cuda", half_precision(load), enabled=load.bf16):
                    loss = parallel(tokens, tokens)
                loss.backward()
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    # The first steps may still hold gradients of the load before, and the first has no state yet.
    allocated, reserved = min(peaks[1:])
    return {"allocated": allocated, "reserved": reserved}


def main(store: str, rank: int, ranks: int, loads: list[dict[str, Any]]) -> None:
    torch._dynamo.config.recompile_limit = 1000  # one compiled block for each size
    torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(hours=2),  # the others wait while this one compiles
        )
    for load in loads:
        gc.collect()  # DDP and its model refer to each other
        torch.cuda.empty_cache()
        found = peak(StepWorkload(**load), rank)
        if rank == 0:
            print(json.dumps(found), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
