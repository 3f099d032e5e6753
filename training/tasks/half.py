"""The 16-bit type in which a model computes: --precision as decided by the plan."""

from __future__ import annotations

import torch

from training.host import decisions

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Of loss, metrics and sample."""
    half = TYPES.get(precision)
    return torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None)


def on(precision: str, device: torch.device) -> str:
    """`precision`, or fp32 where this device only emulates it: up to a hundred times slower."""
    half = TYPES.get(precision)
    if device.type == "cuda":
        emulated = half == torch.bfloat16 and not torch.cuda.is_bf16_supported(False)
    else:
        emulated = half == torch.float16 or (half is not None and not decisions.cpu_bf16())
    return "fp32" if emulated else precision
