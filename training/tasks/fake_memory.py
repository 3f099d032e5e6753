"""The peak of a training step by fake tensors: model and optimizer run without memory and without
arithmetic, and torch counts what would be alive (source: torch/distributed/_tools/mem_tracker.py,
torch/_subclasses).

What it can not see: torch.compile (it measures the eager step), a GPU's own kernels and autocast
list (the tensors are CPU tensors, since a torch for the CPU can not fake others), CUDA's context,
fragmentation. DDP's buckets are the gradients (gradient_as_bucket_view), which are alive from the
start here as they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from training.tasks.memory import Unavailable
from training.tasks.optim import Optimizers


def fake_mode(**settings: Any) -> AbstractContextManager[Any]:
    """Raises Unavailable."""
    try:
        from torch._subclasses import FakeTensorMode
    except ImportError as error:
        raise _unavailable(error) from error
    return FakeTensorMode(**settings)


def step_peak(
    model: nn.Module,
    optimizer: Optimizers,
    batch: list[torch.Tensor],
    loss: Callable[[], torch.Tensor],
    *,
    bf16: bool,
) -> int:
    """Bytes at the peak of a step, in a fake mode. `batch`: what is in memory of it already. Raises
    Unavailable."""
    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        raise _unavailable(error) from error
    begin_gradients(model)
    optimizer.step()  # makes its state
    tracker = MemTracker()
    tracker.track_external(model, *optimizer.parts, *batch)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found = loss()
        found.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    snapshot = tracker.get_tracker_snapshot("peak")
    return sum(int(device["Total"]) for device in snapshot.values())


def begin_gradients(model: nn.Module) -> None:
    """DDP's buckets."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


def _unavailable(error: ImportError) -> Unavailable:
    return Unavailable(
        f"torch {torch.__version__} has no fake tensors with a memory tracker as 2.9 to 2.13 have: "
        f"{error}"
    )
