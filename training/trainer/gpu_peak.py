"""Peak arithmetic of the GPUs of all ranks, for MFU."""

from __future__ import annotations

import torch

from training.host import flops
from training.inspector.distributed import World, exchange_texts


def of_all(world: World, precision: str) -> float | None:
    """Their sum on rank 0, operations per s, in bf16 (also of fp8) or fp16; None on other ranks,
    and if one is unknown, as in fp32 or on a CPU. All ranks must call it once."""
    if world.device.type != "cuda":
        return None
    own = flops.peak(torch.cuda.get_device_name(world.device), precision)
    found = exchange_texts("peak", str(own or ""))
    return sum(map(float, found)) if found and all(found) else None
