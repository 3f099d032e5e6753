"""Duet's model in a bare loop with torch's own optimizers on a fixed batch: the limit of a GPU.

`python -m benchmarks.gpu.bare_loop JOB`, with JOB in JSON; prints {"step_ms": mean, "launches": …}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.timing import autocast, measured
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import BLOCKS_PER_GRAPH, ModelDims


def iteration(precision: str) -> AbstractContextManager[object]:
    """For a step of torch's Muon, which always iterates in bf16. A GPU for which the plan chooses
    another type only emulates that: there it iterates in the plan's, as Duet's."""
    others = {"fp16": torch.Tensor.half, "fp32": torch.Tensor.clone}
    own = others.get(precision)
    return mock.patch.object(torch.Tensor, "bfloat16", own) if own else nullcontext()


def step_of(job: dict[str, Any]) -> Callable[[], object]:
    """One training step. A torch without Muon gets AdamW for the matrices too."""
    shape = ModelDims(job["depth"], job["vocab"], job["seq_len"])
    with torch.device("cuda"):
        model = GPT(shape, MemorySavings(job["blocks"], job["chunks"], job["selective"]))
        tokens = torch.randint(0, min(shape.vocab, 256), (job["sequences"], job["seq_len"] + 1))
    if job["compiled"]:
        model.compile_parts(BLOCKS_PER_GRAPH)
    blocks = list(model.blocks.parameters())
    others = [*model.embedding.parameters(), *model.head.parameters()]
    muon = getattr(torch.optim, "Muon", None) if job["muon"] else None
    if muon:
        optimizers = [torch.optim.AdamW(others, fused=True), muon(blocks)]
    else:
        optimizers = [torch.optim.AdamW([*blocks, *others], fused=True)]
    weights, micro = list(model.parameters()), job.get("micro", 1)

    def step() -> None:
        for _ in range(micro):
            with autocast(job["precision"]):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        with iteration(job["precision"]):
            for one in optimizers:
                one.step()
        for one in optimizers:
            one.zero_grad()

    return step


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps(measured(step_of(job), job)))
