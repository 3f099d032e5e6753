"""Byte tokens: every byte is a token, so any text in any language works with nothing to train or load."""

from __future__ import annotations

VOCAB = 257  # 256 bytes and the document separator
BOS = 256
PADDED_VOCAB = 320  # a multiple of 64: matrix shapes that hardware likes


def encode(text: bytes) -> bytes:
    """The tokens of one document as little-endian uint16, with the separator first."""
    import numpy as np

    return BOS.to_bytes(2, "little") + np.frombuffer(text, np.uint8).astype("<u2").tobytes()


def decode(tokens: list[int]) -> str:
    """Text of the tokens; separators are dropped, bytes that are no UTF-8 become U+FFFD."""
    return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")
