"""Checks of what the methods of a user's task return. They raise TypeError; `task`: its class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

OPTIMIZER = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")


def data(found: Any, task: str, part: str) -> Dataset[Any]:
    """A map-style dataset: each rank reads its samples by index, and all of them are counted."""
    kind = type(found)
    if (
        isinstance(found, IterableDataset)
        or not hasattr(kind, "__len__")
        or not hasattr(kind, "__getitem__")
    ):
        raise TypeError(
            f"{part}_data() of {task} returned {_type(found)}; it must be a map-style dataset, "
            "with len() and [index] of a sample: each rank reads its own samples by index"
        )
    checked: Dataset[Any] = found
    return checked


def optimizer(found: Any, task: str) -> torch.optim.Optimizer:
    """What the trainer calls, without a scheduler of torch: Duet sets the rate of every step. Its
    constructor may change the rates, which are the peak of Duet's schedule, and its schedule would
    have no effect."""
    if not all(hasattr(found, name) for name in OPTIMIZER):
        raise TypeError(
            f"optimizer() of {task} returned {_type(found)}; it must be one torch optimizer (the "
            "schedule is rate(step, total))"
        )
    if hasattr(found.step, "_wrapped_by_lr_sched"):
        raise TypeError(
            f"optimizer() of {task} creates a learning-rate scheduler of torch, which has no "
            "effect in Duet; remove it and define rate(step, total), the fraction of the peak "
            "learning rate in each step"
        )
    checked: torch.optim.Optimizer = found
    return checked


def loss(found: Any, task: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.dim():
        raise TypeError(
            f"loss() of {task} returned {_type(found)}; it must be a tensor without dimensions"
        )
    return found


def metrics(found: Any, task: str, count: int) -> Mapping[str, torch.Tensor]:
    """One real number per sample, by name."""
    if not isinstance(found, Mapping):
        raise TypeError(
            f"metrics() of {task} returned {_type(found)}; it must be a dictionary: name → a "
            "tensor with one value per sample"
        )
    for name, values in found.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"metrics() of {task} returned the name {name!r}; it must be a text")
        if not isinstance(values, torch.Tensor) or values.shape != (count,) or values.is_complex():
            raise TypeError(
                f"metrics() of {task} returned {_type(values)} as {name!r} for {count} samples; it "
                f"must be a tensor with one real number per sample: ({count},)"
            )
    return found


def same_names(found: Iterable[str], others: Iterable[str], task: str, where: str) -> None:
    """The sums of a batch have the names of those of `where`."""
    if set(found) != set(others):
        raise TypeError(
            f"metrics() of {task} returned {_names(found)}, but {_names(others)} for {where}; it "
            "must return the same names for every batch"
        )


def sample(found: Any, task: str) -> str | None:
    if found is not None and not isinstance(found, str):
        raise TypeError(f"sample() of {task} returned {_type(found)}; it must be a text or None")
    return found


def _type(found: Any) -> str:
    """As the user names it: a tensor with its shape, another value by its type."""
    if isinstance(found, torch.Tensor):
        numbers = str(found.dtype).removeprefix("torch.")
        return f"a tensor of {numbers} with the shape {tuple(found.shape)}"
    if found is None:
        return "None"
    kind = type(found)
    module = kind.__module__.partition(".")[0]
    return kind.__name__ if module == "builtins" else f"{module}.{kind.__name__}"


def _names(found: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(found) if name) or "nothing"
