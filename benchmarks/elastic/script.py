"""The script of the comparison, for any launcher: plain DDP, which saves and loads its own
snapshot. It uses nothing of Duet.

    LAUNCHER script.py FOLDER STEPS SAVE_EVERY

The gradient of a step is the mean over the same BATCH sequences with any number of ranks. Rank 0
adds a line to records.jsonl for each step: its time, loss, number of ranks, process, and a sum
that only these sequences have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, MICRO = 12, 3
ROWS, LENGTH, TOKENS, WIDTH = 4096, 32, 256, 64
PACE_S = float(os.environ["PACE_S"])  # for a sequence
# Without it, gloo waits 30 minutes for a machine that is gone.
TIMEOUT = timedelta(seconds=30)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        made: torch.Tensor = self.head(self.block(self.embedding(tokens), mask, is_causal=True))
        return made


def main() -> None:
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    # each token follows from the one before, in one of eight ways
    rows = torch.empty(ROWS, LENGTH + 1, dtype=torch.long)
    rows[:, 0] = torch.randint(TOKENS, (ROWS,))
    for place in range(LENGTH):
        rows[:, place + 1] = (rows[:, place] * 5 + torch.randint(8, (ROWS,))) % TOKENS
    order = torch.randperm(ROWS)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    snapshot, done = folder / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    dist.barrier()  # all have read it before it is written again

    for step in range(done + 1, steps + 1):
        at = (step - 1) * BATCH % (ROWS - BATCH)
        mine = order[at + rank : at + BATCH : ranks]
        batch, loss = rows[mine], torch.zeros(())
        parts = batch.split(MICRO)
        for part in parts:
            time.sleep(PACE_S * len(part))  # in place of the work of a GPU
            model.require_backward_grad_sync = part is parts[-1]
            logits = model(part[:, :-1]).flatten(0, 1)
            share = cross_entropy(logits, part[:, 1:].flatten()) * len(part) / len(batch)
            share.backward()
            loss += share.detach()
        sums = torch.stack([loss.double(), (mine.double() ** 2).sum()])
        dist.all_reduce(sums)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            record = {
                "time": time.time(),
                "step": step,
                "loss": float(sums[0]) / ranks,
                "samples": int(sums[1]),
                "ranks": ranks,
                "writer": os.getpid(),
            }
            with (folder / "records.jsonl").open("a") as records:
                records.write(json.dumps(record) + "\n")
            if step % save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, folder / f"snapshot.{os.getpid()}")
                os.replace(folder / f"snapshot.{os.getpid()}", snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
