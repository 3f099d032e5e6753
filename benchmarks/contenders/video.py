"""Network and data of video restoration in a hand-written bare loop; under torchrun with DDP.
Prints the median ms per step.

python benchmarks/contenders/video.py STEPS SKIPPED OPTION=VALUE…
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from training.config.convert import convert
from training.tasks import find
from training.tasks.video_restoration.dataset import Training
from training.tasks.video_restoration.network import Recurrent
from training.tasks.video_restoration.options import VideoOptions

STEPS, SKIPPED, BATCH = int(sys.argv[1]), int(sys.argv[2]), 2


class Drawn(Dataset[Any]):
    """Random crops and flips, from numpy's global generator."""

    def __init__(self, data: Training) -> None:
        self.data, self.random = data, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data.draw(index, self.random)


def main() -> None:
    fields = find("video_restoration", "")[0].own
    values = dict(word.split("=", 1) for word in sys.argv[3:])
    options = VideoOptions(
        **{name: convert(name, text, True, fields)[0] for name, text in values.items()}
    )
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = Recurrent(3, options.embed_dim, options.num_blocks, int(options.scale))
    if several:
        model = DistributedDataParallel(model)
    data = Drawn(Training(options))
    sampler = DistributedSampler(data) if several else None
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, drop_last=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.G_optimizer_lr, betas=(0.9, 0.99))
    took: list[float] = []
    while len(took) < STEPS:
        last = time.perf_counter()
        for batch in loader:
            loss = (
                ((model(batch["lq"]) - batch["gt"]).square() + options.G_charbonnier_eps)
                .sqrt()
                .mean()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()
            now = time.perf_counter()
            took.append(1000 * (now - last))
            last = now
            if len(took) == STEPS:
                break
    if not several or dist.get_rank() == 0:
        print(statistics.median(took[SKIPPED:]))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
