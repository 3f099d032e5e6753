"""What a model is made of, in numbers. Imports no torch: the plan counts with it."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH_PER_LAYER = 64
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
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
        """Width inside the MLP: 8/3 of the model's, a multiple of 64, so that SwiGLU has the weights of a plain MLP of 4 ×."""
        return round(8 * self.width / 3 / 64) * 64

    @property
    def block_weights(self) -> int:
        """Weights of one block: query, key, value, projection; gate, up, down."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        return self.depth * self.block_weights + 2 * self.vocab * self.width
