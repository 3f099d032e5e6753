"""NVML before pynvml is installed: by the driver's library itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class BareGpu:
    """None: not reported by the driver."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Counted:
    gpus: list[BareGpu]
    driver: str | None
    cuda: int  # as the driver reports it; 0 if it does not
    silent: list[int]  # GPUs that are counted but do not answer


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def count() -> Counted | None:
    """None: the driver does not answer. Raises OSError without its library."""
    nvml, number = ctypes.CDLL(LIBRARY), ctypes.c_uint()
    if nvml.nvmlInitWithFlags(0) != 0:
        return None
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    gpus, silent = [], []
    for index in range(number.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            gpus.append(_read(nvml, index, handle))
        else:
            silent.append(index)
    driver, version = _text(nvml.nvmlSystemGetDriverVersion), ctypes.c_int()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    nvml.nvmlShutdown()
    return Counted(gpus, driver or None, version.value, silent)


def _read(nvml: Any, index: int, handle: ctypes.c_void_p) -> BareGpu:
    uuid, name = (_text(ask, handle) for ask in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName))
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    capability = nvml.nvmlDeviceGetCudaComputeCapability
    known = capability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    told = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return BareGpu(
        index,
        uuid or "-",
        name or "-",
        memory.total if told else None,
        memory.free if told else None,
        (major.value, minor.value) if known else None,
    )


def _text(query: Callable[..., int], *of: Any) -> str:
    """'' if it is not reported."""
    text = ctypes.create_string_buffer(96)
    query(*of, text, len(text))
    return text.value.decode("utf-8", "replace")
