"""Dimensions of a model. No torch: planning imports this module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.run_reader import ADDED

WIDTH_PER_LAYER = 64
HEAD_DIM = 128
# Sizes of a head where HEAD_DIM does not divide the width (odd depths): flash attention has no
# larger ones and pads those that are not multiples of 8. 64 divides every width.
HEAD_DIMS = range(8, 257, 8)
# Bytes of all ranks' updates in one iteration of Muon: on a GPU all matrices of one shape at depth
# 20. The temporary memory is 3.5 times this, after the activations were freed. A CPU launches
# nothing.
MUON_BATCH = {"cuda": 384 << 20, "cpu": 16 << 20}
# Blocks in one compiled graph: the host needs 0.6 of the time for a step, the compiler 1.5 times as
# long.
BLOCKS_PER_GRAPH = 4
# Dimensions of products in fp8 (torch._scaled_mm); the widths are multiples of it at every depth.
FP8_MULTIPLE = 16
ROWS = "vocabulary"  # rows of the embedding
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a model, stored in every checkpoint."""

    depth: int
    vocab: int  # rows of the embedding
    max_seq_len: int
    key_offset: bool = True

    @property
    def width(self) -> int:
        return self.depth * WIDTH_PER_LAYER

    @property
    def heads(self) -> int:
        """Even depths have heads of HEAD_DIM; other widths heads of the size in HEAD_DIMS nearest
        to it. Checkpoints store only the depth, so depths 3, 33 and 65 keep their 192, 132 and
        130: rotary positions need an even size only."""
        heads = max(1, self.width // HEAD_DIM)
        if self.width % (2 * heads) == 0:
            return heads
        fitting = (size for size in HEAD_DIMS if self.width % size == 0)
        return self.width // min(fitting, key=lambda size: abs(size - HEAD_DIM))

    @property
    def inner(self) -> int:
        """Width inside the MLP: 8/3 of the model's, rounded to a multiple of 64, so that SwiGLU has
        as many weights as a plain MLP of 4 ×."""
        return round(8 * self.width / 3 / 64) * 64

    @property
    def block_weights(self) -> int:
        """Weights of one block: query, key, value, projection; gate, up, down."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        return self.depth * self.block_weights + 2 * self.vocab * self.width


def of_checkpoint(facts: Mapping[str, Any]) -> ModelDims:
    """Raises UserError if the model has dimensions that this version does not know."""
    shape = {**ADDED, **facts["shape"]}
    known = [one.name for one in fields(ModelDims)]
    if sorted(shape) != sorted(known):
        what = msg("tasks.gpt.dims.other", theirs=", ".join(shape), known=", ".join(known))
        fixes = [msg("core.run_reader.use_later")]
        raise UserError(Problem("resume.other_model", what, msg("tasks.weights.allowed"), fixes))
    return ModelDims(**shape)


def muon_share(update_bytes: int, ranks: int, device: str) -> int:
    """Matrices of one shape that each rank updates in one iteration of Muon. `update_bytes`: of one
    matrix; `device`: type of the device."""
    most = MUON_BATCH["cuda" if device == "cuda" else "cpu"]
    return max(1, most // (ranks * update_bytes))


def blocks_per_graph(device: str, ranks: int) -> int:
    """One rank exchanges no gradients; several start with those of the last block. A CPU gains
    nothing. `device`: type of the device."""
    return BLOCKS_PER_GRAPH if device == "cuda" and ranks == 1 else 1


def flops_per_token(shape: ModelDims) -> int:
    """Operations of forward and backward pass per token: 6N + 12·L·H·Q·T (PaLM, arXiv:2204.02311,
    appendix B).

    N: weights used in multiplications, so without the embedding, which is a table lookup (counted
    as in nanochat). The second term is attention, as if every token attended to the whole context.
    Recomputation to save memory is not counted.
    """
    multiplied = shape.weights - shape.vocab * shape.width
    return 6 * multiplied + 12 * shape.depth * shape.width * shape.max_seq_len  # H·Q is the width


def sizes_in(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Depth and vocabulary of a file of tensors, under any prefix; empty if it has other names."""
    blocks = [int(found[1]) for name in shapes if (found := _BLOCK.search(name))]
    rows = [one[0] for name, one in shapes.items() if f".{name}".endswith(".embedding.weight")]
    return {"depth": max(blocks) + 1, ROWS: rows[0]} if blocks and rows else {}
