"""A copy of a training state in host memory, which a checkpoint is written from."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from training.tasks import module_versions


class NotPinned(Exception):
    """The driver gives no pinned memory."""


def size(value: Any) -> int:
    """Bytes of all tensors, of sparse ones as if they were dense: those have no nbytes."""
    if is_traceable_wrapper_subclass(value):
        return sum(size(getattr(value, part)) for part in value.__tensor_flatten__()[0])
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return sum(map(size, parts))


def copied(value: Any, buffer: Any, name: str = "", *, pin: bool) -> Any:
    """`value` with every tensor copied to host memory, reusing `buffer`'s tensors if they fit.
    `pin`: copies of tensors on a GPU are pinned. Raises TypeError for an object that no checkpoint
    can be read with, `name`: its keys; and NotPinned."""
    if is_traceable_wrapper_subclass(value):
        return _wrapper_copied(value, buffer, name, pin=pin)
    if isinstance(value, torch.Tensor):
        fits = (
            isinstance(buffer, torch.Tensor)
            and buffer.shape == value.shape
            and buffer.dtype == value.dtype
        )
        pin = pin and value.is_cuda and value.layout == torch.strided
        value = value.detach()
        if type(value) is not torch.Tensor:  # torch.load refuses it
            value = value.as_subclass(torch.Tensor)
        target = buffer if fits else _host_memory(value, pin=pin)
        # into memory that is not pinned, CUDA copies in the same order, and waits for the copy
        return target.copy_(value, non_blocking=True)
    if isinstance(value, dict):
        have = buffer if isinstance(buffer, dict) else {}
        made = {
            key: copied(item, have.get(key), f"{name}[{key!r}]", pin=pin)
            for key, item in value.items()
        }
        if not (versions := module_versions.of(value)):
            return made
        return module_versions.added(made, copied(versions, None, f"{name}._metadata", pin=pin))
    if isinstance(value, (list, tuple)):
        old = (
            buffer
            if isinstance(buffer, (list, tuple)) and len(buffer) == len(value)
            else [None] * len(value)
        )
        return type(value)(
            copied(item, there, f"{name}[{number}]", pin=pin)
            for number, (item, there) in enumerate(zip(value, old, strict=True))
        )
    return _readable(value, name)


def _wrapper_copied(value: Any, buffer: Any, name: str, *, pin: bool) -> Any:
    """A copy of a tensor that consists of others, such as a state of torchao's optimizers."""
    parts, context = value.__tensor_flatten__()
    copies = {
        part: copied(getattr(value, part), getattr(buffer, part, None), name, pin=pin)
        for part in parts
    }
    made = type(value).__tensor_unflatten__(copies, context, value.shape, value.stride())
    return made if type(buffer) is type(value) else _readable(made, name)


def empty_cache() -> None:
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # an earlier torch
        torch._C._host_emptyCache()  # type: ignore[attr-defined]


def _host_memory(like: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Memory for a copy of this tensor. Raises NotPinned."""
    try:
        return torch.empty_like(like, device="cpu", pin_memory=pin)
    except RuntimeError as error:  # AcceleratorError and OutOfMemoryError, too
        if pin:
            raise NotPinned(str(error).partition("\n")[0]) from None
        raise


def _readable(value: Any, name: str) -> Any:
    """`value`, a number of numpy as one of Python. Raises TypeError for what torch.load with
    weights_only refuses."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.generic):
        return value.item()
    copy = io.BytesIO()
    try:
        torch.save(value, copy)
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"the state of model or optimizer contains a {kind} at {name}, which a "
            "checkpoint cannot be read with; use tensors, numbers, text, lists and dicts"
        ) from error
    return value
