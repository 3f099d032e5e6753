"""Tokenizer interface and the byte tokenizer. Imports only the standard library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core.messages import msg
from training.data.readers import DocumentPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


BYTES, BPE = "bytes", "bpe"
VOCAB = 257  # 256 bytes and the document separator
BOS = 256
PADDED_VOCAB = 320  # for the byte tokenizer
BOS_NAME = "<|bos|>"
# The separator's names in other tokenizers, best match first.
BOS_NAMES = (
    BOS_NAME,
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "[BOS]",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
)
JSON, TIKTOKEN = "tokenizer.json", "ranks.tiktoken"  # names in a prepared folder
ALLOWED = msg("data.tokenizer.allowed")
FIXES = ("--tokenizer=bytes", "--tokenizer=bpe")


def padded(vocab: int) -> int:
    """`vocab` rounded up to a multiple of 64: matrix shapes that hardware handles well."""
    return -(-vocab // 64) * 64


def bos_among(special: Mapping[str, int]) -> str:
    """The special token that separates documents, "" if there is none."""
    return next((name for name in BOS_NAMES if name in special), "")


class Tokenizer(ABC):
    """`name`: for display; `vocab`: ids 0 … vocab-1, including the separator `bos`; `padded_vocab`:
    rows of the embedding."""

    name: str
    vocab: int
    padded_vocab: int
    bos: int

    @property
    def token_bytes(self) -> int:
        """Bytes per token in a shard."""
        return 2 if self.vocab <= 1 << 16 else 4

    def encode_documents(self, texts: Iterable[str | bytes]) -> Iterator[npt.NDArray[Any]]:
        """Tokens of each document, separator first: little-endian uint16 or uint32, (tokens,)."""
        return self.encode_pieces(
            DocumentPart(t.encode("utf-8", "replace") if isinstance(t, str) else t) for t in texts
        )

    @abstractmethod
    def encode_pieces(self, pieces: Iterable[DocumentPart]) -> Iterator[npt.NDArray[Any]]:
        """Tokens of each piece in turn; the separator precedes only a document's first piece."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens. Separators and ids beyond the vocabulary are dropped; invalid UTF-8
        becomes U+FFFD."""

    @abstractmethod
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of text per token, (vocab,); 0 for the separator and other special tokens."""

    def save(self, folder: Path) -> str:
        """Write the file that loads the tokenizer. Returns its name, "" if none is needed."""
        return ""


class Bytes(Tokenizer):
    """Every byte is a token: works for any text without training or files."""

    name = BYTES
    vocab, padded_vocab, bos = VOCAB, PADDED_VOCAB, BOS

    def encode_pieces(self, pieces: Iterable[DocumentPart]) -> Iterator[npt.NDArray[Any]]:
        import numpy as np

        for content, first, _ in pieces:
            tokens = np.empty(len(content) + first, "<u2")
            if first:
                tokens[0] = BOS
            tokens[int(first) :] = np.frombuffer(content, np.uint8)
            yield tokens

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < BOS).decode("utf-8", errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        import numpy as np

        return (np.arange(VOCAB) < BOS).astype(np.int64)
