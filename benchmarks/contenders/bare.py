"""The limit: a hand-written loop without any framework."""

from __future__ import annotations

import time

import torch

from benchmarks.contenders import parts


def run(job: parts.Job) -> parts.Trace:
    model, trace = parts.model(job), parts.Trace()
    optimizer = parts.optimizer(model)
    parameters = list(model.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=job.bf16)
    for inputs, targets in parts.Steps(job):
        with autocast:
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, parts.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        trace.stamps.append(time.perf_counter())
    trace.loss = loss.item()
    return trace
