"""Checks of what the methods of a user's task return. They raise TypeError, whose traceback ends in
the method: a check that fails is found there, not in Duet. `task`: the class."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

WHOLE_LINE = 10_000  # columns: a traceback then marks no part of the line
MOST_SAMPLES = 3  # that are named
OPTIMIZER = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")


def model(found: Any, task: type) -> nn.Module:
    if not isinstance(found, nn.Module):
        _wrong(task, "model", f"returned {_type(found)}; it must be a torch.nn.Module")
    return found


def data(found: Any, task: type, part: str) -> Dataset[Any]:
    """A map-style dataset: each rank reads its samples by index, and all of them are counted."""
    kind = type(found)
    if (
        isinstance(found, IterableDataset)
        or not hasattr(kind, "__len__")
        or not hasattr(kind, "__getitem__")
    ):
        _wrong(
            task,
            f"{part}_data",
            f"returned {_type(found)}; it must be a map-style dataset, with len() and [index] of a "
            "sample: each rank reads its own samples by index",
        )
    checked: Dataset[Any] = found
    return checked


def no_sample(task: type, part: str, index: int, error: StopIteration) -> NoReturn:
    """A StopIteration of the user's code, as an error at the same place."""
    what = f"{part}_data() of {task.__name__}: sample {index} raised StopIteration"
    why = "next() raises it where nothing is found and no default is given"
    raise RuntimeError(f"{what}; {why}").with_traceback(error.__traceback__) from None


def note_sample(part: str, index: int, error: Exception) -> None:
    """Add the sample to the last lines of the error's traceback."""
    if sys.version_info >= (3, 11):
        error.add_note(f"while reading sample {index} of {part}_data()")


def no_batch(
    task: type, part: str, indices: Iterable[int], samples: Sequence[Any], error: Exception
) -> NoReturn:
    """Samples that torch cannot collate, with those that differ from most of the others; `error`:
    torch's, which names none of them."""
    found = [_parts(sample) for sample in samples]
    usual = max(found, key=found.count)
    odd = [(index, own) for index, own in zip(indices, found, strict=True) if own != usual]
    if not odd and not isinstance(error, TypeError):
        raise error  # such as shared memory that is full
    what = f"returned samples that do not form a batch: {error}"
    if odd:
        shown = "; ".join(f"sample {index} {_odd(own, usual)}" for index, own in odd[:MOST_SAMPLES])
        more = f"; and {len(odd) - MOST_SAMPLES} others" if len(odd) > MOST_SAMPLES else ""
        what = (
            f"returned samples that do not form a batch: {shown}{more}; all samples must have the "
            "same keys and shapes: pad or filter them in the dataset"
        )
    _wrong(task, f"{part}_data", what)


def _parts(sample: Any, path: str = "") -> dict[str, str]:
    """What a batch must have in common: path of each part → its shape, or its type."""
    if isinstance(sample, Mapping):
        inner: Iterable[tuple[Any, Any]] = sample.items()
    elif isinstance(sample, (list, tuple)):
        inner = enumerate(sample)
    elif isinstance(shape := getattr(sample, "shape", None), tuple):
        return {path: f"a tensor of the shape {tuple(shape)}"}
    else:
        return {path: "a number" if isinstance(sample, Real) else _type(sample)}
    return {
        name: what
        for key, value in inner
        for name, what in _parts(value, f"{path}[{key!r}]").items()
    }


def _odd(own: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """The first difference of a sample from the others."""
    path = next(path for path in (*own, *usual) if own.get(path) != usual.get(path))
    if path not in own:
        return f"has no {path}"
    shown = f"has {own[path]} in {path}" if path else f"is {own[path]}"
    return f"{shown}, others {usual[path]}" if path in usual else shown


def optimizer(found: Any, task: type) -> torch.optim.Optimizer:
    """What the trainer calls, with a rate, which is the peak of Duet's schedule: Duet sets the rate
    of every step. Without a scheduler of torch: its constructor may change the rates, and its
    schedule would have no effect."""
    if not all(hasattr(found, name) for name in OPTIMIZER):
        _wrong(
            task,
            "optimizer",
            f"returned {_type(found)}; it must be one torch optimizer (the schedule is "
            "rate(step, total))",
        )
    if hasattr(found.step, "_wrapped_by_lr_sched"):
        _wrong(
            task,
            "optimizer",
            "creates a learning-rate scheduler of torch, which has no effect in Duet; remove it "
            "and define rate(step, total), the fraction of the peak learning rate in each step",
        )
    rates = [group.get("lr") for group in found.param_groups]
    if not all(isinstance(rate, (Real, torch.Tensor)) for rate in rates):
        _wrong(
            task,
            "optimizer",
            "has a parameter group without a learning rate; Duet sets the rate of every step: give "
            "it the peak, such as lr=1e-3 (Adafactor of transformers: with relative_step=False)",
        )
    checked: torch.optim.Optimizer = found
    return checked


def loss(found: Any, task: type, model: nn.Module) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.dim():
        _wrong(task, "loss", f"returned {_type(found)}; it must be a tensor without dimensions")
    if torch.is_grad_enabled() and not found.requires_grad:
        _wrong(
            task,
            "loss",
            "returned a tensor without a gradient; it must be computed by the model, without "
            "detach(), no_grad() or item(), and the model must have weights that are trained",
        )
    device = next((weight.device for weight in model.parameters()), found.device)
    if found.device.type not in ("cpu", device.type):
        _wrong(
            task,
            "loss",
            f"returned a tensor on {found.device}; it must be on {device}, where the model is",
        )
    return found


def metrics(found: Any, task: type, count: int) -> Mapping[str, torch.Tensor]:
    """One real number per sample, by name."""
    if not isinstance(found, Mapping):
        _wrong(
            task,
            "metrics",
            f"returned {_type(found)}; it must be a dictionary: name → a tensor with one value per "
            "sample",
        )
    for name, values in found.items():
        if not isinstance(name, str) or not name:
            _wrong(task, "metrics", f"returned the name {name!r}; it must be a text")
        if not isinstance(values, torch.Tensor) or values.shape != (count,) or values.is_complex():
            _wrong(
                task,
                "metrics",
                f"returned {_type(values)} as {name!r} for {count} samples; it must be a tensor "
                f"with one real number per sample: ({count},)",
            )
    return found


def same_names(found: Iterable[str], others: Iterable[str], task: type, where: str) -> None:
    """The sums of a batch have the names of those of `where`."""
    if set(found) != set(others):
        _wrong(
            task,
            "metrics",
            f"returned {_names(found)}, but {_names(others)} for {where}; it must return the same "
            "names for every batch",
        )


def sample(found: Any, task: type) -> str | None:
    if found is not None and not isinstance(found, str):
        _wrong(task, "sample", f"returned {_type(found)}; it must be a text or None")
    return found


def raise_at(error: Exception, file: str, line: int, name: str) -> NoReturn:
    """Raise `error` as if the line of this file did."""
    statement = ast.parse("raise error")
    for node in ast.walk(statement):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = line
            node.col_offset, node.end_col_offset = 0, WHOLE_LINE
    exec(compile(statement, file, "exec").replace(co_name=name), {"error": error})
    raise AssertionError


def _wrong(task: type, method: str, what: str) -> NoReturn:
    """Raise a TypeError at the definition of the method."""
    error = TypeError(f"{method}() of {task.__name__} {what}")
    written = getattr(task, method, None)
    code = getattr(inspect.unwrap(written), "__code__", None) if written else None
    if not isinstance(code, CodeType):  # an object that is called, or set on the task itself
        raise error
    raise_at(error, code.co_filename, code.co_firstlineno, code.co_name)


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
