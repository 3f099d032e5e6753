"""The arithmetic of fp32 products on GPUs, as decided by the plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


class Fp32Modes(NamedTuple):
    """`products`: of matrices, as of torch.set_float32_matmul_precision; `convolutions`: whether
    they use TF32."""

    products: str
    convolutions: bool


def select(plan: Plan, device: torch.device) -> None:
    """Give torch the plan's settings for a training. A CPU has its own, which stay."""
    if device.type != "cuda":
        return
    _select(_planned(plan))
    torch.backends.cudnn.benchmark = plan["cudnn_benchmark"]["value"]


@contextmanager
def as_trained(plan: Plan, device: torch.device, made: Fp32Modes | None = None) -> Iterator[None]:
    """Products as in the training, within a with block. `made`: what the task had set when its
    model was made. Plans of early versions have no setting: those of torch stay."""
    if device.type != "cuda" or "tf32" not in plan:
        yield
        return
    before = current()
    _select(made or _planned(plan))
    try:
        yield
    finally:
        _select(before)


def current() -> Fp32Modes:
    """By the interface of torch 2.9: after a change by that, the older one raises RuntimeError, or
    returns what was set before."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        return Fp32Modes(torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    products = "highest"
    if cuda.matmul.fp32_precision == "tf32":
        try:
            products = torch.get_float32_matmul_precision()
        except RuntimeError:
            products = "high"
    return Fp32Modes(products, cudnn.conv.fp32_precision == "tf32")


def _planned(plan: Plan) -> Fp32Modes:
    fast = plan["tf32"]["value"]
    return Fp32Modes("high" if fast else "highest", fast)


def _select(modes: Fp32Modes) -> None:
    with warnings.catch_warnings():  # torch 2.9 calls its own function old
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        torch.set_float32_matmul_precision(modes.products)
        torch.backends.cudnn.allow_tf32 = modes.convolutions
