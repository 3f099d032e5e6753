"""Utilisation of a GPU by others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.host.nvml import ask

if TYPE_CHECKING:
    from training.host.gpus import Gpu

BUSY_PERCENT = 30  # makes a measured bandwidth too low
# One sample of the driver covers up to a second (nvml.h, nvmlUtilization_t).
SAMPLE_S = 1.2


def percent(handle: Any) -> int | None:
    load = ask("nvmlDeviceGetUtilizationRates", handle)
    return load.gpu if load else None


def after_load(every: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs, with a later utilisation where the load of the driver may be the reason of an
    earlier one. Without persistence mode nvmlInit loads it; that clears ECC memory, which NVML
    reports as about 99 % (nvml.h, nvmlDeviceGetUtilizationRates). NVML must remain open in between:
    the next nvmlInit would load the driver again."""
    found = {gpu.index: gpu for gpu in every}
    handles = {
        index: ask("nvmlDeviceGetHandleByIndex", index)
        for index, gpu in found.items()
        if (gpu.use_percent or 0) >= BUSY_PERCENT and not gpu.processes
    }
    loaded = {
        index: handle
        for index, handle in handles.items()
        if ask("nvmlDeviceGetPersistenceMode", handle) == 0
    }
    if loaded:
        time.sleep(SAMPLE_S)
    for index, handle in loaded.items():
        found[index] = replace(found[index], use_percent=percent(handle))
    return list(found.values())
