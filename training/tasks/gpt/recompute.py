"""Selective recomputation: a block keeps the results of its matrix products and its attention, and
recomputes the rest (norms, rotary positions, SwiGLU's product, casts) in the backward pass.

The same policy serves eager and compiled blocks. It keeps less than torch's activation memory
budget does without repeating a product: docs/memory_accuracy.md.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
# Which one runs depends on device, precision and version; the mathematical fallback is none of
# them and is recomputed.
ATTENTION = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
}


def policy(_context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    if operator in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if operator in PRODUCTS:
        left, right = args[-2:]
        # The last product of a block is narrower than its input. Nothing in the block's backward
        # pass reads it.
        if right.shape[1] >= left.shape[1]:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# Its only warning is of in-place operators in the forward pass, which a block has none of.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def keeping_products() -> Any:
    """Contexts of a block's forward pass and of its recomputation."""
    return create_selective_checkpoint_contexts(policy)
