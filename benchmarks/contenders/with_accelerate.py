"""Hugging Face accelerate: a hand-written loop with wrapped parts."""

from __future__ import annotations

import time

from accelerate import Accelerator

from benchmarks.contenders import parts


def run(job: parts.Job) -> parts.Trace:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.bf16 else "no")
    plain, trace = parts.model(job), parts.Trace()
    model, optimizer, loader = accelerator.prepare(plain, parts.optimizer(plain), parts.loader(job))
    for inputs, targets in loader:
        loss = model(inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), parts.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        trace.stamps.append(time.perf_counter())
    trace.loss = loss.item()
    return trace
