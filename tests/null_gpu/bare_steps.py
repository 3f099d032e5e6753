"""Other code in a bare loop, for comparison: `bare_steps.py OUT.json MODEL DEPTH SEQUENCES LENGTH
COMPILED` on null GPUs; it is the rank in the variables of torchrun. MODEL `same`: Duet's model with
torch's own optimizers, fused AdamW and Muon, and with torch's DDP on several ranks; `nanochat`: its
model and optimizer, which exchanges the gradients of several ranks itself, from the user's checkout
on PYTHONPATH. Writes as count_steps.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import nanochat_loop, timing
from tests.null_gpu import counters, host_time
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import ModelDims, blocks_per_graph

STEPS, VOCABULARY, PRECISION = 20, 320, "bf16"
RANKS = int(os.environ["WORLD_SIZE"])


def same(
    depth: int, length: int, compiled: int
) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    with torch.device("cuda"):
        model = GPT(ModelDims(depth, VOCABULARY, length), MemorySavings(0, 1))
    if compiled:
        model.compile_parts(blocks_per_graph("cuda", RANKS))
    blocks = list(model.blocks.parameters())
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.AdamW(others, fused=True), torch.optim.Muon(blocks)]
    if RANKS == 1:
        return model, optimizers
    here = [torch.cuda.current_device()]
    shared = DistributedDataParallel(model, device_ids=here, gradient_as_bucket_view=True)
    return shared, optimizers


def nanochat(
    depth: int, length: int, compiled: int
) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    size = {"depth": depth, "seq_len": length, "vocab": VOCABULARY, "precision": PRECISION}
    model, optimizers = nanochat_loop.build(size)
    if compiled:
        model.compile(dynamic=False)
    return model, optimizers


def main(out: str, kind: str, depth: int, sequences: int, length: int, compiled: int) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if RANKS > 1:
        dist.init_process_group("nccl", device_id=device)
    make, context = MODELS[kind]
    model, optimizers = make(depth, length, compiled)
    tokens = torch.zeros(sequences, length, dtype=torch.int64, device="cuda")
    steps: list[dict[str, Any]] = []
    for _ in range(STEPS):
        started, started_cpu = time.perf_counter(), time.process_time()
        with context(PRECISION):
            loss = model(tokens, tokens)
        loss.backward()
        if kind == "same":  # nanochat does not clip
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        other, begun, begun_cpu = counters.take(), time.perf_counter(), time.thread_time()
        for one in optimizers:
            one.step()
        optimizer_ms = 1000 * (time.perf_counter() - begun)
        optimizer_cpu_ms = 1000 * (time.thread_time() - begun_cpu)
        for one in optimizers:
            one.zero_grad()
        record = {"optimizer": counters.take(), "other": other, "optimizer_ms": optimizer_ms}
        record["optimizer_cpu_ms"] = optimizer_cpu_ms
        record["step_ms"] = 1000 * (time.perf_counter() - started)
        record["step_cpu_ms"] = 1000 * (time.process_time() - started_cpu)
        record["launches_ms"] = host_time.launches_ms()
        counters.take()
        steps.append(record)
    Path(out).write_text(json.dumps(steps))
    if dist.is_initialized():
        dist.destroy_process_group()


MODELS = {"same": (same, timing.autocast), "nanochat": (nanochat, nanochat_loop.context)}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
