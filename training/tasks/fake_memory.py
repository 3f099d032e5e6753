"""Peak memory of a training step by fake tensors: model and optimizer run without memory or
arithmetic, and torch counts what would be allocated (torch/distributed/_tools/mem_tracker.py,
torch/_subclasses).

Not covered: torch.compile (the eager step is measured), a GPU's own kernels (the tensors are CPU
tensors, since a CPU build of torch cannot fake others), the CUDA context,
fragmentation. DDP's buckets are the gradients (gradient_as_bucket_view), allocated from the start
unless the caller excludes it: one rank has none before the backward pass of its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from training.core.messages import msg
from training.tasks.cuda_autocast import CudaAutocast
from training.tasks.memory import Unavailable
from training.tasks.optim import Optimizers


def fake_mode(**settings: Any) -> AbstractContextManager[Any]:
    """Fake tensor mode. Raises Unavailable."""
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
    autocast: torch.dtype | None,
    cuda: bool = False,
    held: bool = True,
) -> int:
    """Bytes at the peak of a step, in a fake mode. `batch`: its tensors already in memory;
    `autocast`: its type, None for fp32; `cuda`: as on a GPU; `held`: see gradients_peaks. Raises
    Unavailable."""
    gradients = gradients_peaks(
        *(model, optimizer, batch, loss), autocast=autocast, cuda=cuda, held=held
    )
    return max(*gradients, update_peak(model, optimizer, batch))


def gradients_peaks(
    model: nn.Module,
    optimizer: Optimizers,
    batch: list[torch.Tensor],
    loss: Callable[[], torch.Tensor],
    *,
    autocast: torch.dtype | None,
    cuda: bool = False,
    held: bool = True,
) -> tuple[int, int]:
    """As step_peak, of the forward pass and of it with the backward pass. `held`: whether there are
    gradients before them."""
    found: list[torch.Tensor] = []
    mode = CudaAutocast if cuda else nullcontext

    def forward() -> None:
        with mode(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            found.append(loss())

    def backward() -> None:
        with mode():  # activation checkpointing repeats forward passes
            found.pop().backward()  # type: ignore[no-untyped-call]

    first, both = _peaks(model, optimizer, batch, forward, backward, held=held)
    return first, both


def update_peak(model: nn.Module, optimizer: Optimizers, batch: list[torch.Tensor]) -> int:
    """Bytes at the peak of clipping and of the optimizer's step, in a fake mode. Raises
    Unavailable."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _peaks(model, optimizer, batch, update)[0]


def _peaks(
    model: nn.Module,
    optimizer: Optimizers,
    batch: list[torch.Tensor],
    *parts: Callable[[], None],
    held: bool = True,
) -> list[int]:
    """The peak from the start to the end of each part."""
    tracker, found = _tracker(), []
    begin_gradients(model)
    optimizer.step()  # creates its state
    if not held:
        optimizer.zero_grad()
    tracker.track_external(model, *optimizer.parts, *batch)
    with tracker:
        for part in parts:
            part()
            snapshot = tracker.get_tracker_snapshot("peak")
            found.append(sum(int(device["Total"]) for device in snapshot.values()))
    return found


def _tracker() -> Any:
    """Raises Unavailable."""
    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        raise _unavailable(error) from error

    class Totals(MemTracker):
        """Without the statistics of each module, whose hooks refuse frozen weights and a second
        call of a module outside of the model."""

        def __init__(self) -> None:
            super().__init__()
            self._called: WeakSet[nn.Module] = WeakSet()

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            if module not in self._called:  # it may be outside of the model, a teacher
                self._called.add(module)
                self._track_module_params_and_buffers(module, install_grad_hooks=False)

        def _post_fw_hook(self, *_: Any) -> None: ...
        def _pre_bw_hook(self, *_: Any) -> None: ...
        def _post_bw_hook(self, *_: Any) -> None: ...

    return Totals()


def begin_gradients(model: nn.Module) -> None:
    """Allocate gradients, as DDP's buckets do."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


def _unavailable(error: ImportError) -> Unavailable:
    return Unavailable(msg("tasks.fake.no_tracker", version=torch.__version__, error=error))
