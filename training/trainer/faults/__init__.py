"""Implementation of `--inject`: one function per row of training.config.fault_table, with the same
name. They run in the rank, on its main thread, at a phase that training.trainer.inject waits for;
the training code does not know about them."""

from __future__ import annotations

from collections.abc import Callable

from training.config.fault_table import TABLE
from training.trainer.faults import data, stuck
from training.trainer.faults.context import FaultContext

__all__ = ["ACTS", "FaultContext"]


def _act(name: str) -> Callable[[FaultContext], object]:
    found = next(
        getattr(module, n)
        for n in (name, f"{name}_")
        for module in (stuck, data)
        if hasattr(module, n)
    )
    act: Callable[[FaultContext], object] = found
    return act


ACTS = {name: _act(name) for name in TABLE}
