"""Products of a GPT's blocks in fp8, by torchao's float8 training.

One scale per tensor, from its largest value: the recipe "tensorwise", the fastest one according to
torchao. Head, embedding and attention keep bf16; the weights stay fp32 and keep their names, so
optimizers and checkpoints do not change.
"""

from __future__ import annotations

import logging

from torch import nn

from training.tasks.gpt.model_dims import FP8_MULTIPLE


def convert(blocks: nn.ModuleList, tokens: int) -> None:
    """Let the linear layers of these blocks multiply in fp8. `tokens` of a micro-batch: they are
    the inner dimension of the weights' gradients, padded with zeros if they do not fit."""
    # Its import warns about kernels for other methods, which this torch may be unable to load.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    finally:
        logging.disable(before)
    padded = tokens % FP8_MULTIPLE > 0
    convert_to_float8_training(blocks, config=Float8LinearConfig(pad_inner_dim=padded))
