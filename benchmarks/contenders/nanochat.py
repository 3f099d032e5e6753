"""nanochat's model and optimizer, with the learning rates and schedules of its base_train.py: a
contender of benchmarks.target. Its files are the user's: a checkout of
https://github.com/karpathy/nanochat in NANOCHAT_DIR.

python -m benchmarks.contenders.nanochat RUN        RUN: the fields of Run in JSON

On a CPU the model is eager as the others are; its optimizer compiles its steps. `rate` is a factor
of all its learning rates, which it also scales by the square root of the batch. All layers attend
to the whole sequence, as in its runs/runcpu.sh: its default would give three of four layers windows
of 128 tokens here (nanochat_windows), with a higher loss at the best rates of 300 steps.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.loop import Contender, Run, train
from benchmarks.flags import NANOCHAT_DIR

# Defaults of base_train.py of July 2026 (92d63d4).
EMBEDDING, UNEMBEDDING, MATRIX, SCALAR, DECAY = 0.3, 0.008, 0.02, 0.5, 0.28
WIDTH, HEAD_DIM, BATCH = 64, 128, 1 << 19  # tokens of a batch at depth 12
WARMUP_STEPS, WARMDOWN, FINAL = 40, 0.65, 0.05
MOMENTUM_STEPS, MOMENTUM = 400, (0.85, 0.97, 0.90)
FULL, DEFAULT = "L", "SSSL"


def make(run: Run, windows: str = FULL) -> Contender:
    """`windows`: nanochat's pattern of short (S) and full (L) ones."""
    os.environ["NANOCHAT_DTYPE"] = "bfloat16" if run.bf16 else "float32"
    sys.path.insert(0, os.environ[NANOCHAT_DIR])
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    def described(depth: int) -> Any:
        heads = -(-depth * WIDTH // HEAD_DIM)
        return GPTConfig(
            sequence_len=run.seq_len,
            vocab_size=run.vocab,
            n_layer=depth,
            n_head=heads,
            n_kv_head=heads,
            n_embd=heads * HEAD_DIM,
            window_pattern=windows,
        )

    def weights(model: Any) -> int:
        counts = model.num_scaling_params()
        return int(counts["transformer_matrices"] + counts["lm_head"])

    with torch.device("meta"):
        model, reference = GPT(described(run.depth)), GPT(described(12))
    model.to_empty(device=run.device)
    model.init_weights()
    batch = (run.batch * run.seq_len / BATCH) ** 0.5
    rate = run.rate * batch
    decay = DECAY * batch * weights(reference) / weights(model)
    optimizer = model.setup_optimizer(
        unembedding_lr=UNEMBEDDING * rate,
        embedding_lr=EMBEDDING * rate,
        scalar_lr=SCALAR * rate,
        matrix_lr=MATRIX * rate,
        weight_decay=decay,
    )

    def loss(inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return model(inputs, targets.contiguous(), loss_reduction=reduction)  # type: ignore[no-any-return]

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share(step, run.steps)
            if group["kind"] == "muon":
                group["momentum"] = momentum(step, run.steps)
                group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return Contender(model, loss, update, [optimizer])


def share(step: int, steps: int) -> float:
    """Share of the peak rate at this step (0-based)."""
    down = round(WARMDOWN * steps)
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    if step <= steps - down:
        return 1.0
    left = (steps - step) / down
    return left + (1 - left) * FINAL


def momentum(step: int, steps: int) -> float:
    first, middle, last = MOMENTUM
    down = round(WARMDOWN * steps)
    if step < MOMENTUM_STEPS:
        return first + (middle - first) * step / MOMENTUM_STEPS
    if step >= steps - down:
        return middle + (last - middle) * (step - (steps - down)) / down
    return middle


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])), make)
