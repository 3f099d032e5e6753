"""nanochat's model and optimizer on a fixed batch, in the loop of its base training.

`python -m benchmarks.gpu.nanochat_loop JOB`, with the user's checkout of nanochat on PYTHONPATH.
Its vocabulary is that of Duet's run, so that both do the same arithmetic outside their blocks.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from benchmarks.gpu.timing import autocast, measured
from training.tasks.gpt.model_dims import ModelDims


def build(job: dict[str, Any]) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """Its model on the GPU, not compiled, and its optimizers with their defaults."""
    # Read by its later versions, whose layers cast themselves.
    kinds = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    os.environ["NANOCHAT_DTYPE"] = kinds[job["precision"]]
    gpt = import_module("nanochat.gpt")
    shape = ModelDims(job["depth"], job["vocab"], job["seq_len"])
    wanted = {
        "sequence_len": shape.max_seq_len,
        "vocab_size": shape.vocab,
        "n_layer": shape.depth,
        "n_head": shape.heads,
        "n_kv_head": shape.heads,
        "n_embd": shape.width,
        "window_pattern": "L",  # the whole context in every layer, as Duet
    }
    known = inspect.signature(gpt.GPTConfig).parameters
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(**{k: v for k, v in wanted.items() if k in known}))
    model.to_empty(device="cuda")
    model.init_weights()
    # A list of optimizers in its first versions, one later.
    made = getattr(model, "setup_optimizers", None) or model.setup_optimizer
    optimizers = made()
    return model, optimizers if isinstance(optimizers, list) else [optimizers]


def context(precision: str) -> AbstractContextManager[object]:
    """What its forward pass runs in: its first versions in autocast, under which rms_norm of later
    ones would return fp32."""
    later = hasattr(import_module("nanochat.gpt"), "COMPUTE_DTYPE")
    return nullcontext() if later else autocast(precision)


def step_of(job: dict[str, Any]) -> Callable[[], object]:
    model, optimizers = build(job)
    compiled = torch.compile(model, dynamic=False) if job["compiled"] else model
    size = (job["sequences"], job["seq_len"] + 1)
    tokens = torch.randint(0, min(job["vocab"], 256), size, device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    micro = job.get("micro", 1)

    def step() -> None:
        for _ in range(micro):
            with context(job["precision"]):
                loss = compiled(inputs, targets) / micro
            loss.backward()
        for one in optimizers:
            one.step()
        model.zero_grad(set_to_none=True)

    return step


def attention() -> str:
    """The kernel of its attention, or '' if unknown: it loads FlashAttention 3 from the network."""
    module = sys.modules.get("nanochat.flash_attention")
    uses = getattr(module, "USE_FA3", None)
    return "" if uses is None else "FlashAttention 3" if uses else "torch's attention"


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps(measured(step_of(job), job) | {"attention": attention()}))
