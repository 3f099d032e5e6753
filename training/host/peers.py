"""Direct (peer-to-peer) copies between GPUs, as far as the driver allows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.host.nvml import ask

if TYPE_CHECKING:
    from training.host.gpus import Gpu

READ, WORKS = 0, 0  # NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK


def status(first: Any, second: Any) -> int | None:
    """WORKS, or the driver's reason against them; None: not reported."""
    found: int | None = ask("nvmlDeviceGetP2PStatus", first, second, READ)
    return found


def counted(every: Sequence[Gpu]) -> list[Gpu]:
    """All GPUs of the machine, each with the number of its peers."""
    handles = {gpu.index: ask("nvmlDeviceGetHandleByIndex", gpu.index) for gpu in every}

    def peers(index: int) -> int | None:
        asked = (
            status(handles[index], other)
            for at, other in handles.items()
            if at != index and None not in (other, handles[index])
        )
        known = [one for one in asked if one is not None]
        return known.count(WORKS) if known else None

    return [replace(gpu, peers=peers(gpu.index)) for gpu in every]
