"""Learned vocabularies: Hugging Face tokenizers (trained here or read from a tokenizer.json) and
tiktoken ranks.

Both libraries are optional (training.data.optional_deps), so they are imported at their first use.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.core import rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import tokenizer_base
from training.data.readers import DocumentPart
from training.data.tokenizer_base import BOS_NAME, Tokenizer, bos_among, padded
from training.host import env_vars, program

# GPT-4's split: contractions, words with one leading space, up to three digits, punctuation,
# lines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with bounded words, for a vocabulary learned here: learning is quadratic in the length
# of a word, and a line without spaces would be one word.
WORD = 32  # characters
LEARNED_SPLIT = (
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}{{1,{WORD}}}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]{{1,{WORD}}}[\r\n]{{0,{WORD}}}|\s{{0,{WORD}}}[\r\n]{{1,{WORD}}}"
    rf"|\s{{1,{WORD}}}(?!\S)|\s{{1,{WORD}}}"
)
BATCH = 1 << 20  # bytes of text tokenized at once on all cores
Tokens = npt.NDArray[Any]


class _Batched(Tokenizer):
    """Encodes pieces in batches and keeps their order."""

    def encode_pieces(self, pieces: Iterable[DocumentPart]) -> Iterator[Tokens]:
        waiting: list[DocumentPart] = []
        size = 0
        for piece in pieces:
            waiting.append(piece)
            size += len(piece.content) + 64  # empty documents count too
            if size >= BATCH:
                yield from self._encode(waiting)
                waiting, size = [], 0
        yield from self._encode(waiting)

    def _encode(self, pieces: list[DocumentPart]) -> Iterator[Tokens]:
        # files are read as UTF-8
        texts = [piece.content.decode("utf-8", "replace") for piece in pieces]
        for piece, ids in zip(pieces, self._ids(texts), strict=True):
            yield np.array([self.bos, *ids] if piece.first else ids, f"<u{self.token_bytes}")

    @abstractmethod
    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """The tokens of each text."""


class Learned(_Batched):
    """A tokenizer.json. Its settings for padding, truncation and added tokens are ignored."""

    def __init__(self, path: Path, name: str, padded_vocab: int) -> None:
        # without it the library warns at every later fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        library = import_module("tokenizers")
        try:
            self.inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                Problem(
                    "tokenizer.invalid",
                    msg("data.tokenizer.file_error", path=path, error=error),
                    tokenizer_base.ALLOWED,
                    list(tokenizer_base.FIXES),
                )
            ) from None
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = True  # "<|bos|>" in a text is text
        added = self.inner.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        bos = bos_among(self.special)
        if not bos:
            self.inner.add_special_tokens([BOS_NAME])
            bos, self.special[BOS_NAME] = BOS_NAME, self.inner.token_to_id(BOS_NAME)
        self.bos = self.special[bos]
        self.vocab = max(self.inner.get_vocab(with_added_tokens=True).values()) + 1
        self.padded_vocab = padded_vocab
        self.name = name

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return (
            found.ids for found in self.inner.encode_batch_fast(texts, add_special_tokens=False)
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.inner.decode([int(i) for i in ids if i < self.vocab], skip_special_tokens=True)
        )

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        parts = json.loads(self.inner.to_str())
        by_bytes = '"ByteLevel"' in json.dumps([parts.get("pre_tokenizer"), parts.get("decoder")])
        added = {token.content for token in self.inner.get_added_tokens_decoder().values()}
        lengths = np.zeros(self.vocab, np.int64)
        for text, number in self.inner.get_vocab(with_added_tokens=True).items():
            if text in self.special:
                continue
            if text in added:
                lengths[number] = len(text.encode())
            elif by_bytes:
                lengths[number] = len(text)  # one character of its alphabet per byte
            elif len(text) == 6 and text.startswith("<0x"):
                lengths[number] = 1
            else:
                lengths[number] = len(text.removeprefix("##").replace("▁", " ").encode())
        return lengths

    def save(self, folder: Path) -> str:
        save(self.inner, folder / tokenizer_base.JSON)
        return tokenizer_base.JSON


class Ranks(_Batched):
    """A .tiktoken file of mergeable ranks, split as GPT-4 does."""

    def __init__(self, path: Path, name: str, padded_vocab: int) -> None:
        library = import_module("tiktoken")
        self.path, self.name = path, name
        self.ranks = _ranks(path)
        self.bos = max(self.ranks.values()) + 1
        self.vocab = self.bos + 1
        self.padded_vocab = padded_vocab
        self.inner = library.Encoding(
            name, pat_str=SPLIT, mergeable_ranks=self.ranks, special_tokens={BOS_NAME: self.bos}
        )
        self._text = {rank: token for token, rank in self.ranks.items()}

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        found: list[list[int]] = self.inner.encode_ordinary_batch(
            texts, num_threads=env_vars.cpu_count()
        )
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._text.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        lengths = np.zeros(self.vocab, np.int64)
        for token, rank in self.ranks.items():
            lengths[rank] = len(token)
        return lengths

    def save(self, folder: Path) -> str:
        shutil.copyfile(self.path, folder / tokenizer_base.TIKTOKEN)
        return tokenizer_base.TIKTOKEN


def _ranks(path: Path) -> dict[bytes, int]:
    def wrong(what: str) -> UserError:
        return UserError(
            Problem(
                "tokenizer.invalid",
                msg("data.tokenizer.file_error", path=path, error=what),
                tokenizer_base.ALLOWED,
                list(tokenizer_base.FIXES),
            )
        )

    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            size = len(ranks)
            ranks[token] = int(rank)
            taken.add(ranks[token])
        except (ValueError, binascii.Error):
            raise wrong(msg("data.tokenizer.not_base64_rank", number=number)) from None
        if not token or not size < len(ranks) == len(taken):
            raise wrong(msg("data.tokenizer.duplicate", number=number))
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise wrong(msg("data.tokenizer.single_bytes", count=len(lacking)))
    return ranks


def train(
    texts: Iterable[str], vocab_size: int, folder: Path, waiting: Callable[[], None] = lambda: None
) -> Learned:
    """Train a byte-level BPE vocabulary of at most `vocab_size` ids, separator included, and save
    it in `folder`. `waiting` is called regularly during training."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    library = import_module("tokenizers")
    inner = library.Tokenizer(library.models.BPE())
    parts = [
        library.pre_tokenizers.Split(library.Regex(LEARNED_SPLIT), "isolated"),
        library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    inner.pre_tokenizer = library.pre_tokenizers.Sequence(parts)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_NAME],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _interruptible(lambda: inner.train_from_iterator(iter(texts), trainer), waiting)
    save(inner, folder / tokenizer_base.JSON)
    # fewer than requested if the text is too short for that many merges
    found = inner.get_vocab_size(with_added_tokens=True)
    return Learned(
        folder / tokenizer_base.JSON, f"bpe, {found} tokens, trained on the data", padded(found)
    )


def save(inner: Any, file: Path) -> None:
    """As the library writes it, which raises a plain Exception on a full disk; this raises
    OSError."""
    rundir.write_bytes(file, inner.to_str(pretty=True).encode())


def _interruptible(work: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Run `work` in a thread and call `waiting` a few times a second: the library ignores signals
    for minutes, and Ctrl-C must end the program, by program.leave()."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=program.NATIVE, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        waiting()
    if failure:
        raise failure[0]
