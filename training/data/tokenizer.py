"""Text to tokens and back: bytes, or a vocabulary trained on the corpus or loaded from a file.

Imports only the standard library: planning needs the vocabulary size. The libraries of learned
vocabularies are used in training.data.bpe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core import rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.data.tokenizer_base import (
    ALLOWED,
    BPE,
    BYTES,
    FIXES,
    JSON,
    PADDED_VOCAB,
    TIKTOKEN,
    Bytes,
    Tokenizer,
    bos_among,
    padded,
)

if TYPE_CHECKING:
    from training.data.prepared_corpus import PreparedCorpus

_TIKTOKEN_LINES = re.compile(
    rb"(?:[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n)*(?:[A-Za-z0-9+/]+={0,2} [0-9]+)?"
)


def for_corpus(prepared: PreparedCorpus) -> Tokenizer:
    """The tokenizer of a prepared corpus, read from its folder. Raises UserError."""
    index = rundir.read_json(Path(prepared.folder, "index.json")) or {}
    name = index.get("tokenizer_file")
    if name is None:
        fixes = [f"rm -r {shlex.quote(prepared.folder)}"]
        what = msg("data.tokenizer.index", folder=prepared.folder)
        raise UserError(
            Problem(
                "tokenizer.unreadable",
                what,
                msg("data.tokenizer.intact"),
                fixes,
            ),
            Exit.RESOURCES,
        )
    return (
        load(str(Path(prepared.folder, name)), prepared.tokenizer, prepared.vocab)
        if name
        else Bytes()
    )


def file_in(folder: Path) -> Path | None:
    """The file of a learned vocabulary in a prepared or exported folder or a run."""
    return next((f for f in (folder / JSON, folder / TIKTOKEN) if f.is_file()), None)


def identity(prepared: PreparedCorpus) -> str:
    """Identity of the corpus's tokenizer: the checksum of its file in the prepared folder, or
    "bytes"."""
    file = file_in(Path(prepared.folder))
    return checksum(file) if file else BYTES


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load(tokenizer: str, name: str = "", padded_vocab: int = 0) -> Tokenizer:
    """The tokenizer for a value of `--tokenizer` other than bpe. Raises UserError for an invalid
    file."""
    if tokenizer == BYTES:
        return Bytes()
    from training.data import bpe

    path = expanded(tokenizer)
    kind = bpe.Ranks if path.suffix.lower() == ".tiktoken" else bpe.Learned
    ids = _facts(path)[0]
    found = kind(path, name or f"{path.name}, {ids} tokens", padded_vocab or padded(ids))
    if found.vocab > found.padded_vocab:
        raise UserError(
            Problem(
                "tokenizer.changed",
                msg("data.tokenizer.changed", path=path, vocab=found.vocab, ids=ids),
                ALLOWED,
                list(FIXES),
            )
        )
    return found


def expanded(tokenizer: str) -> Path:
    return Path(os.path.expanduser(tokenizer))  # noqa: PTH111 – Path.expanduser raises for an unknown user


# ── facts read from the file without loading a tokenizer
# ────────────────────────────────────────────────────────


def vocab_of(tokenizer: str, vocab_size: int) -> int:
    """Rows of the embedding (a multiple of 64) for a value of `--tokenizer`, found in milliseconds.
    For bpe this is the maximum, since a short text gives fewer.

    Raises UserError for a file that is not a tokenizer; `check` also names the origin of the value.
    """
    if tokenizer == BYTES:
        return PADDED_VOCAB
    if tokenizer == BPE:
        return padded(vocab_size)
    if problems := check(tokenizer):
        raise UserError(problems)
    return padded(_facts(expanded(tokenizer))[0])


def fewer(tokenizer: str, vocab_size: int, rows: int) -> str:
    """A note if the text of a bpe tokenizer gave fewer tokens than requested, or "". `rows`: of the
    embedding."""
    if tokenizer != BPE or rows >= padded(vocab_size):
        return ""
    return msg("data.tokenizer.fewer", vocab_size=vocab_size, rows=rows)


def check(tokenizer: str, origin: str = "") -> list[Problem]:
    """Problems of a value of `--tokenizer`. `origin`: where it was set."""
    if tokenizer in (BYTES, BPE):
        return []
    path, given = (
        expanded(tokenizer),
        msg("data.tokenizer.given", tokenizer=tokenizer)
        + (msg("data.corpus.origin", origin=origin) if origin else ""),
    )
    if path.is_dir() and (path / JSON).is_file():
        return [
            Problem(
                "tokenizer.is_folder",
                msg("data.tokenizer.is_folder", given=given),
                ALLOWED,
                [f"--tokenizer={shlex.quote(os.path.join(tokenizer, JSON))}"],
            )
        ]
    if not path.is_file():
        return [
            Problem(
                "tokenizer.missing",
                msg("data.tokenizer.missing", given=given),
                ALLOWED,
                list(FIXES),
            )
        ]
    if path.suffix.lower() not in (".json", ".tiktoken"):
        return [
            Problem(
                "tokenizer.suffix", msg("data.tokenizer.suffix", given=given), ALLOWED, list(FIXES)
            )
        ]
    try:
        _facts(path)
    except OSError as error:
        return [
            Problem(
                "tokenizer.unreadable",
                msg("data.tokenizer.unreadable", given=given, strerror=error.strerror),
                msg("data.corpus.readable"),
                [f"chmod u+r {shlex.quote(str(path))}"],
            )
        ]
    except ValueError as error:
        return [
            Problem(
                "tokenizer.invalid",
                msg("data.tokenizer.invalid", given=given, error=error),
                ALLOWED,
                list(FIXES),
            )
        ]
    return []


def _facts(path: Path) -> tuple[int, str]:
    """(number of ids including Duet's separator, name of the file's own separator or "")."""
    state = path.stat()
    return _read_facts(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read_facts(path: Path, changed: int, size: int) -> tuple[int, str]:
    content = path.read_bytes()
    return (
        (tiktoken_ids(content) + 1, "")
        if path.suffix.lower() == ".tiktoken"
        else _json_facts(content)
    )


def tiktoken_ids(content: bytes) -> int:
    """Number of ids in a .tiktoken file, lines of base64 and rank. Raises ValueError with the wrong
    line."""
    if not _TIKTOKEN_LINES.fullmatch(content):
        for number, line in enumerate(content.splitlines(), 1):
            if not _TIKTOKEN_LINES.fullmatch(line) or not line:
                raise ValueError(
                    msg(
                        "data.tokenizer.line",
                        number=number,
                        line=line[:40].decode("utf-8", "replace"),
                    )
                )
    lines = content.rstrip().count(b"\n") + 1
    last = int(content.rsplit(None, 1)[-1]) if content.strip() else -1
    # as in every common file: 0, 1, 2, …; loading checks every line
    if last + 1 == lines:
        return lines
    ranks = list(map(int, content.split()[1::2]))
    if not ranks:
        raise ValueError(msg("data.tokenizer.empty"))
    if max(ranks) >= 1 << 24:
        raise ValueError(msg("data.tokenizer.rank_too_large", rank=max(ranks)))
    return max(ranks) + 1


def _json_facts(content: bytes) -> tuple[int, str]:
    """`_facts` of a tokenizer.json. The merges, more than half of the file, are not parsed if they
    end it, as in every file that the library writes."""
    merges = re.search(rb'"merges"\s*:\s*\[', content)
    wrong = msg("data.tokenizer.not_hugging_face")
    found: Any = None
    if merges and re.search(rb"\]\s*\}\s*\}\s*$", content):
        with contextlib.suppress(ValueError):
            found = json.loads(content[: merges.end()] + b"]}}")
    try:
        found = found or json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(msg("data.tokenizer.wrong", wrong=wrong, error=error)) from None
    try:
        vocab, added = found["model"]["vocab"], found.get("added_tokens") or []
        ids = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values())
        ids += [token["id"] for token in added]
        bos = bos_among({t["content"]: t["id"] for t in added if t.get("special")})
        return max(map(int, ids)) + (1 if bos else 2), bos
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(msg("data.tokenizer.no_vocabulary", wrong=wrong)) from None
