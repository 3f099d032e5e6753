"""The arithmetic of fp32 products on GPUs, as decided by the plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def select(plan: Plan, device: torch.device) -> None:
    """Give torch the plan's settings for a training. A CPU has its own, which stay."""
    if device.type != "cuda":
        return
    _select_tf32("high" if plan["tf32"]["value"] else "highest", plan["tf32"]["value"])
    torch.backends.cudnn.benchmark = plan["cudnn_benchmark"]["value"]


@contextmanager
def as_trained(plan: Plan, device: torch.device) -> Iterator[None]:
    """Products as in the training, within a with block. Plans of early versions have no setting:
    those of torch stay."""
    if device.type != "cuda" or "tf32" not in plan:
        yield
        return
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    fast = plan["tf32"]["value"]
    _select_tf32("high" if fast else "highest", fast)
    try:
        yield
    finally:
        _select_tf32(products, convolutions)


def _select_tf32(products: str, convolutions: bool) -> None:
    with warnings.catch_warnings():  # torch 2.9 calls its own function old
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
