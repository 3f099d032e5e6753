"""A hand-written DDP loop with the inspector and with faults: inspected_loop.py "FAULT;FAULT…"
[MODE] [STEPS].

For two ranks, epochs of 40 batches of 4 from 320 samples, until STEPS (80).
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)

from training.inspector import DDPInspector

FAULTS = sys.argv[1].split(";")
MODE = sys.argv[2] if len(sys.argv) > 2 else "auto"
# A loaded machine does slow a rank down: only the tests of a slow rank look for one.
FACTOR = 1.3 if "slow" in FAULTS else 10
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 80
BATCH, SAMPLES, SLOW, QUICK = 4, 320, 0.02, 0.004


def sample(index):
    return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        values = sample(index)
        if "nan" in FAULTS and rank == 1 and index == 13:
            values[2] = float("nan")
        return values


class Stream(IterableDataset):
    def __iter__(self):
        own = range(SAMPLES) if "same stream" in FAULTS else range(rank, SAMPLES, 2)
        yield from map(sample, own)


@record  # a frame of torch.distributed
def evaluate():
    time.sleep(6)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
if "fsdp" in FAULTS:  # no fault: every rank holds a part of the parameters
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
if "stream" in FAULTS or "same stream" in FAULTS:
    loader = DataLoader(Stream(), batch_size=BATCH)
else:
    data = Samples()
    sampler = (
        None if "no sampler" in FAULTS else DistributedSampler(data, shuffle="shuffle" in FAULTS)
    )
    if "own shuffle" in FAULTS:
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
if "uneven" in FAULTS:
    loader = DataLoader(
        Subset(Samples(), range(100 * rank, 100 * rank + (12 - 2 * rank) * BATCH)), batch_size=BATCH
    )
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inspector = DDPInspector(model, loader, every=20, on_finding=MODE, slow=FACTOR, patience_s=3)
step = 0
for _epoch in range(1 if "uneven" in FAULTS else 4):
    for fetched in loader:
        if step == STEPS:
            break
        step += 1
        time.sleep(SLOW if "slow" in FAULTS and rank == 1 else QUICK)
        batch = fetched[:0] if "empty" in FAULTS and rank == 1 and step == 7 else fetched
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if "changed" in FAULTS and rank == 1 and step == 15:
            with torch.no_grad():
                model.module[2].bias.add_(1e-6)
        inspector.step(loss, batch)
    if "evaluate" in FAULTS and rank == 0 and _epoch == 0:  # no fault, the others wait
        evaluate()
if "uneven" in FAULTS and rank == 1:
    time.sleep(600)  # as a rank that evaluates, or waits for the others in its own way
print(f"rank {rank} done", flush=True)
dist.destroy_process_group()
