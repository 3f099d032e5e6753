"""The same model in a bare loop, for comparison: `bare_steps.py OUT.json DEPTH SEQUENCES LENGTH
COMPILED` on one null GPU, with torch's own optimizers: fused AdamW, and Muon for the blocks if this
torch has it. Writes as count_steps.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.null_gpu import counters
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import ModelDims

STEPS, VOCABULARY = 8, 320


def main(out: str, depth: int, sequences: int, length: int, compiled: int) -> None:
    with torch.device("cuda"):
        model = GPT(ModelDims(depth, VOCABULARY, length), MemorySavings(0, 1))
        tokens = torch.zeros(sequences, length, dtype=torch.int64)
    if compiled:
        model.compile_parts()
    blocks = list(model.blocks.parameters())
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.AdamW(others, fused=True), torch.optim.Muon(blocks)]
    steps: list[dict[str, Any]] = []
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        other, begun = counters.take(), time.perf_counter()
        for one in optimizers:
            one.step()
        record = {"optimizer_ms": 1000 * (time.perf_counter() - begun)}
        steps.append(record | {"optimizer": counters.take(), "other": other})
        for one in optimizers:
            one.zero_grad()
    Path(out).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
