"""Bytes are tokens: whatever goes in comes out."""

from __future__ import annotations

import random

import pytest

from training.data.tokenizer import BOS, PADDED_VOCAB, VOCAB, decode, encode


def tokens(text: bytes) -> list[int]:
    raw = encode(text)
    return [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]


def test_the_vocabulary() -> None:
    assert (VOCAB, BOS) == (257, 256)
    assert PADDED_VOCAB >= VOCAB and PADDED_VOCAB % 64 == 0


def test_any_bytes_come_back() -> None:
    chance = random.Random(1)
    for text in (b"", b"\0", bytes(range(256)), "训练 🙂 é".encode(), chance.randbytes(10_000)):
        found = tokens(text)
        assert found[0] == BOS
        assert bytes(found[1:]) == text
        assert max(found) < VOCAB


@pytest.mark.parametrize("text", ["", "hello\n", "训练 🙂 é", "a\0b"])
def test_text_comes_back(text: str) -> None:
    assert decode(tokens(text.encode())) == text


def test_separators_are_dropped_and_broken_text_is_marked() -> None:
    assert decode([BOS, 104, 105, BOS, 33]) == "hi!"
    assert decode(list("é".encode())[:1]) == "\ufffd"
    # The model may choose a row that only pads the vocabulary.
    assert decode([104, PADDED_VOCAB - 1]) == "h"
