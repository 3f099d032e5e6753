"""Damaged memory of GPUs, as the driver counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from training.host.nvml import ask

# Of nvml.h; pynvml's constant for reading is a tuple by mistake.
UNCORRECTED, VOLATILE = 1, 0


def uncorrected_errors(handle: Any) -> int | None:
    """Since the driver was loaded; None: not reported."""
    found: int | None = ask("nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, VOLATILE)
    return found


def remapping(handle: Any) -> tuple[bool | None, bool | None]:
    """(damaged memory is remapped at the next reset, remapping has failed); None: not reported."""
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    if rows:
        return bool(rows[2]), bool(rows[3])
    # cards before Ampere
    pages = ask("nvmlDeviceGetRetiredPagesPendingStatus", handle) if rows is None else None
    return None if pages is None else bool(pages), None


def damaged(indices: Iterable[int]) -> set[int]:
    """The GPUs with uncorrected errors or memory that could not be remapped; none before the
    installation, and if the driver does not respond."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return set()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # reported by gpus.inventory()
        return set()
    try:
        handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in indices}
        return {
            index
            for index, handle in handles.items()
            if handle is not None and (uncorrected_errors(handle) or remapping(handle)[1])
        }
    finally:
        pynvml.nvmlShutdown()
