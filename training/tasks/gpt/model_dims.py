"""What a model is made of, in numbers. Imports no torch: the plan counts with it."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH_PER_LAYER = 64
HEAD_DIM = 128


@dataclass(frozen=True)
class ModelDims:
    """What the model is made of; stands in every checkpoint."""

    depth: int
    vocab: int  # rows of the embedding
    max_seq_len: int

    @property
    def width(self) -> int:
        return self.depth * WIDTH_PER_LAYER

    @property
    def heads(self) -> int:
        return max(1, self.width // HEAD_DIM)

    @property
    def inner(self) -> int:
        """Width inside the MLP: 8/3 of the model's, a multiple of 64, so that SwiGLU has the
        weights of a plain MLP of 4 ×."""
        return round(8 * self.width / 3 / 64) * 64

    @property
    def block_weights(self) -> int:
        """Weights of one block: query, key, value, projection; gate, up, down."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        return self.depth * self.block_weights + 2 * self.vocab * self.width


def flops_per_token(shape: ModelDims) -> int:
    """Operations of forward and backward pass for one token: 6N + 12·L·H·Q·T (PaLM,
    arXiv:2204.02311, appendix B).

    N: weights that are multiplied, so without the embedding, which is only looked up (as nanochat
    counts). The second term is attention, as if every token saw the whole context. What is computed
    again to save memory does not count.
    """
    multiplied = shape.weights - shape.vocab * shape.width
    return 6 * multiplied + 12 * shape.depth * shape.width * shape.max_seq_len  # H·Q is the width
