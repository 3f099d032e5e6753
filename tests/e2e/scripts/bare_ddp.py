"""A plain torchrun-style DDP script without Duet. Each rank writes its result to the file
argv[1]<rank>."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 11):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
with open(f"{sys.argv[1]}{rank}", "w") as file:
    file.write(f"{dist.get_world_size()} {os.environ['LOCAL_RANK']} {model.module.bias.item():.6f}")
print(f"rank {rank} done")
dist.destroy_process_group()
