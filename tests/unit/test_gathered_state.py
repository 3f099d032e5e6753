"""The state of an optimizer that the ranks share, collected on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.test_gpt_muon_ranks import END, run

BEGIN = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from training.tasks.gpt.muon import Muon
from training.tasks.optim import Optimizers

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank,
                        world_size=ranks)
"""

GATHERING = (
    BEGIN
    + """
weights = [torch.nn.Parameter(torch.zeros(512, 1024)) for _ in range(20)]  # 40 MiB
if sys.argv[4] == "muon":
    part = Muon(weights, lr=0.02, weight_decay=0.0, momentum=0.9, dtype=torch.float32)
    own = [bucket.momentum for bucket in part.buckets]
else:
    part = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.02, momentum=0.9)
    for weight in weights:
        weight.grad = weight.detach()
    part.step()
    own = [one["momentum_buffer"] for one in part.optim.state.values()]
optimizer = Optimizers([part])
sent = torch.cat([one.fill_(1 + rank).flatten() for one in own])
received = [torch.empty_like(sent) for _ in range(ranks)]


def seconds(collective):
    dist.barrier()
    started = time.perf_counter()
    collective()
    dist.barrier()
    return time.perf_counter() - started


# In turns, and the fastest of each: other programs delay some rounds.
rounds = [(seconds(optimizer.gather), seconds(lambda: dist.all_gather(received, sent)))
          for _ in range(5)]
if rank == 0:
    (state,) = optimizer.state_dict()
    means = sorted(float(one["momentum_buffer"].mean()) for one in state["state"].values())
    assert means == [1.0] * 10 + [2.0] * 10
    torch.save([min(times) for times in zip(*rounds)], f"{folder}/seconds.pt")
"""
    + END
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "zero"])
def test_the_state_is_gathered_as_tensors_not_byte_by_byte(kind: str, tmp_path: Path) -> None:
    """The limit is relative to a collective of the same bytes. Tensors took 0.15 to 0.4 of its time,
    pickled ones 50 times as long, on two busy cores."""
    ranks = 2
    started = [run(rank, ranks, tmp_path, GATHERING, kind) for rank in range(ranks)]
    assert [process.wait(120) for process in started] == [0] * ranks
    gather, all_gather = torch.load(tmp_path / "seconds.pt")
    assert gather < 8 * all_gather, (
        f"{gather:.3f} s, a collective of the same bytes {all_gather:.3f} s"
    )


SHARING = (
    BEGIN
    + """

def made(model):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return Optimizers([optimizer])


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.schedule(1, 0.5)
    optimizer.step()


torch.manual_seed(0)
model, again = (torch.nn.Linear(8, 8) for _ in range(2))
optimizer = made(model)
step(model, optimizer)
optimizer.gather()
if rank == 0:
    torch.save(optimizer.state_dict(), f"{folder}/state.pt")
dist.barrier()
state = torch.load(f"{folder}/state.pt", weights_only=True)
again.load_state_dict(model.state_dict())
resumed = made(again)
assert resumed.fits(state)
resumed.load_state_dict(state)
step(model, optimizer)
step(again, resumed)
assert all(map(torch.equal, model.parameters(), again.parameters()))
"""
    + END
)


@pytest.mark.slow
def test_torchs_optimizer_that_shares_its_state_is_saved_and_resumed(tmp_path: Path) -> None:
    started = [run(rank, 2, tmp_path, SHARING) for rank in range(2)]
    assert [process.wait(120) for process in started] == [0, 0]


TREES = (
    BEGIN
    + """
from training.tasks.collectives import gather_trees


def tree(rank):
    torch.manual_seed(rank)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return {
        "step": torch.tensor(float(rank)),
        "half": [torch.randn(3, 5).bfloat16().t(), (torch.randn(4) > 0, torch.zeros(0))],
        "image": image.requires_grad_(),
        "wide": torch.randn(4, 6)[:, ::2],
        "complex": torch.randn(3, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse() * rank,
        **({"more": torch.ones(1), "none": None} if rank == 1 else {}),
    }


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        return all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, torch.Tensor):
        return one == other
    if one.layout == torch.strided:
        assert one.stride() == torch.empty_like(other).stride(), "fused optimizers refuse others"
    return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())


mine = tree(rank)
found = gather_trees(mine, torch.device("cpu"), dist.group.WORLD)
if rank:
    assert found == []
else:
    assert found[0] is mine
    assert all(map(same, found[1:], map(tree, range(1, ranks))))
"""
    + END
)


@pytest.mark.slow
def test_trees_of_any_tensors_are_gathered(tmp_path: Path) -> None:
    started = [run(rank, 3, tmp_path, TREES) for rank in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
