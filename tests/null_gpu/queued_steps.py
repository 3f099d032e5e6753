"""Memory at the loss of steps that the host queues before the GPU has run them: `queued_steps.py
OUT.json` on null GPUs; it is the rank in the variables of torchrun. Writes the number of weights, and
for each of `gradient_compression` the most bytes that torch's allocator counts at a loss."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.plan.tuning import BF16, NONE
from training.trainer import compression

WIDTH, LAYERS, STEPS = 1024, 16, 10
SETTLED = 4  # steps until the state of the optimizer and the buckets of DDP are the final ones


def at_loss(compressed: bool, device: torch.device) -> int:
    with device:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        data = torch.zeros(1, WIDTH)
    model = DistributedDataParallel(
        nn.Sequential(*layers), device_ids=[device.index], gradient_as_bucket_view=True
    )
    if compressed:
        compression.register(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found, before = [], None
    for _ in range(STEPS):
        loss = model(data).sum()
        found.append(torch.cuda.memory_allocated())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = torch.cuda.Event()
        done.record()
        if before:
            before.synchronize()  # as training.trainer.step_queue
        before = done
    torch.cuda.synchronize()
    return max(found[SETTLED:])


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    found = {name: at_loss(name == BF16, device) for name in (NONE, BF16)}
    out.write_text(json.dumps([{"weights": LAYERS * WIDTH**2, **found}]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
