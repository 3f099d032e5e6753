"""Muon shared by real processes computes what one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

RANKS = 3
# As Duet's own ranks: an interpreter that ends with a process group may be aborted by the group's
# threads.
END = """
import os
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)
"""
PROGRAM = (
    """
import sys
import torch
import torch.distributed as dist
from training.tasks.gpt.muon import Muon

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
if ranks > 1:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank,
                            world_size=ranks)
torch.manual_seed(0)
shapes = [(12, 8)] * 5 + [(8, 8)] + [(8, 12)] * 3  # 2 + 2 + 1; one for rank 0 alone; one each
weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
optimizer = Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.9, dtype=torch.float32)
for step in range(4):
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    optimizer.step()
    if step == 1:  # a resumed run
        optimizer.gather()
        if rank == 0:
            torch.save(optimizer.state_dict(), f"{folder}/state{ranks}.pt")
        if ranks > 1:
            dist.barrier()
        fresh = Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.9, dtype=torch.float32)
        fresh.load_state_dict(torch.load(f"{folder}/state{ranks}.pt"))
        optimizer = fresh
torch.save([w.detach() for w in weights], f"{folder}/{ranks}.{rank}.pt")
"""
    + END
)


def run(
    rank: int, ranks: int, folder: Path, program: str = PROGRAM, *words: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(rank), str(ranks), str(folder), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_ranks_share_the_work_and_agree_with_one_process(tmp_path: Path) -> None:
    started = [run(0, 1, tmp_path), *(run(rank, RANKS, tmp_path) for rank in range(RANKS))]
    assert [process.wait(120) for process in started] == [0] * len(started)
    alone = torch.load(tmp_path / "1.0.pt")
    for rank in range(RANKS):
        shared = torch.load(tmp_path / f"{RANKS}.{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True)), rank
    states = [torch.load(tmp_path / f"state{n}.pt")["state"] for n in (1, RANKS)]
    assert list(states[0]) == list(states[1])
    assert all(
        torch.equal(states[0][i]["momentum_buffer"], states[1][i]["momentum_buffer"])
        for i in states[0]
    )
