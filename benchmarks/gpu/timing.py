"""Time and CUDA calls of a training step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Names of the CUDA runtime and driver, as the profiler reports them.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PROFILED = 5  # steps


def autocast(precision: str) -> torch.autocast:
    """Of Duet's precision: bf16, fp16 (without a loss scale, which costs no time), fp32: none."""
    kind = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast("cuda", kind, enabled=precision != "fp32")


def measured(step: Callable[[], object], job: Mapping[str, Any]) -> dict[str, Any]:
    """Mean time of `steps` steps after `warm_up`, until the GPU is idle; with `count`, calls of a
    step."""
    for _ in range(job["warm_up"]):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(job["steps"]):
        step()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    found: dict[str, Any] = {
        "step_ms": 1000 * (ended - begun) / job["steps"],
        "host_ms": 1000 * (queued - begun) / job["steps"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    if job.get("count"):
        with profiler() as profile:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        found["calls"] = calls(profile, PROFILED, own_waits=1)
    return found


def profiler() -> Any:
    """Of CUDA calls."""
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])


def calls(profile: Any, steps: int, own_waits: int = 0) -> dict[str, float] | None:
    """Launches and waits of a step; None if CUDA cannot be traced on this machine.
    `own_waits`: those of the measurement itself."""
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith(LAUNCHES):
            found["launches"] += 1
        elif event.name.startswith(WAITS):
            found["waits"] += 1
    if not found["launches"]:
        return None
    own_waits += 1  # torch.profiler synchronises once before it stops tracing
    found["waits"] -= min(own_waits, found["waits"])
    return {name: found[name] / steps for name in ("launches", "waits")}
