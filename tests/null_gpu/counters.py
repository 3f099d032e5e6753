"""Calls that this process has made to the null GPU, which is preloaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping


def take() -> dict[str, int]:
    """Calls by name since the last time."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    name, calls, found, number = ctypes.c_char_p(), ctypes.c_long(), dict[str, int](), 0
    while library.null_gpu_count(number, ctypes.byref(name), ctypes.byref(calls)):
        if calls.value and name.value:
            found[name.value.decode()] = calls.value
        number += 1
    library.null_gpu_reset()
    return found


def launches(calls: Mapping[str, int]) -> int:
    """Kernels, matrix products, copies on the device and memsets."""
    on_device = ("copy on device", "memset")
    return sum(n for name, n in calls.items() if name.startswith("LAUNCH") or name in on_device)


def waits(calls: Mapping[str, int]) -> dict[str, int]:
    """Calls in which the host waits for the device, by name."""
    return {name: n for name, n in calls.items() if name.startswith("SYNC") and n}
