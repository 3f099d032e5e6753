"""NVLink connections between GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from training.host.nvml import ask

MOST = 36  # NVML_NVLINK_MAX_LINKS
INDEX, WORKS = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


def active(handle: Any) -> int | None:
    """Number of active links of a GPU; None: it has none."""
    up = []
    for link in range(MOST):
        found = ask("nvmlDeviceGetNvLinkState", handle, link)
        if found is None:  # past the last one
            break
        up.append(bool(found))
    return sum(up) if up else None


def connects(first: Any, second: Any) -> bool | None:
    """Whether NVLink connects two GPUs; None: unknown."""
    status = ask("nvmlDeviceGetP2PStatus", first, second, INDEX)
    return None if status is None else status == WORKS


def pairs(indices: Iterable[int]) -> set[frozenset[int]]:
    """The connected pairs of these GPUs. The driver must have answered before."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in indices}
        return {
            frozenset((one, other))
            for one, other in itertools.combinations(handles, 2)
            if connects(handles[one], handles[other])
        }
    finally:
        pynvml.nvmlShutdown()
