"""A prepared corpus on disk (training.data.prepare): its facts, and the check of its files."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import owner, project, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.data import shards
from training.data.tokenizer_base import BOS, BYTES, PADDED_VOCAB

FORMAT = 3
SHARD_TOKENS = 1 << 27
Checking = Callable[[int, int], None]  # bytes done, total bytes


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus on disk, in tokens. `vocab`: embedding rows of the model, the tokenizer's ids and
    padding."""

    folder: str
    name: str
    documents: int
    train_tokens: int
    val_tokens: int
    tokenizer: str = (
        BYTES  # a description; training.data.tokenizer.for_corpus() loads the tokenizer
    )
    vocab: int = PADDED_VOCAB
    token_bytes: int = 2
    bos: int = BOS
    shard_tokens: int = SHARD_TOKENS
    # of text, without separators; converts a loss in nats per token to bits per byte
    bytes_per_token: float = 1.0

    @property
    def train(self) -> list[Path]:
        return self._paths("train")

    @property
    def val(self) -> list[Path]:
        return self._paths("val")

    def sizes(self, part: str) -> list[int]:
        """Tokens of each shard of "train" or "val"."""
        return shards.sizes(
            self.train_tokens if part == "train" else self.val_tokens, self.shard_tokens
        )

    def _paths(self, part: str) -> list[Path]:
        return [Path(self.folder, name) for name in shards.names(part, len(self.sizes(part)))]


def content(data: PreparedCorpus) -> str:
    """One checksum of all tokens, independent of folder and source files."""
    files = (rundir.read_json(Path(data.folder, "index.json")) or {"files": {}})["files"]
    return hashlib.sha256(
        json.dumps(
            {n: f["sha256"] for n, f in files.items() if n.endswith(".bin")}, sort_keys=True
        ).encode()
    ).hexdigest()


def existing(folder: Path, checking: Checking) -> tuple[PreparedCorpus | None, str]:
    """(the intact corpus, or None; what is damaged, or ""). Raises UserError if it may not be
    read."""
    if not folder.exists():
        return None, ""
    try:
        return _verified(folder, checking)
    except OSError as error:
        raise _unreadable(folder, error) from None


def _verified(folder: Path, checking: Checking) -> tuple[PreparedCorpus | None, str]:
    try:
        index = json.loads((folder / "index.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        index = None
    try:
        if not index or index["format"] != FORMAT:
            return None, msg("data.prepare.index_damaged")
        facts = {name: index[name] for name in PreparedCorpus.__dataclass_fields__}
        prepared = PreparedCorpus(**facts | {"folder": str(folder)})
        expected = {
            path.name: size * prepared.token_bytes
            for part in ("train", "val")
            for path, size in _shards(prepared, part)
        }
        if any(index["files"][name]["bytes"] != size for name, size in expected.items()):
            return None, msg("data.prepare.index_inconsistent")
        damage = shards.damage(folder, index["files"], checking)
    except (KeyError, TypeError, AttributeError):
        return None, msg("data.prepare.index_damaged")
    return (None, damage) if damage else (prepared, "")


def _unreadable(folder: Path, error: OSError) -> UserError:
    user = owner.name(folder.resolve())  # it may be a link
    what = msg("data.prepare.unreadable", folder=folder, owner=user, strerror=error.strerror)
    allowed = msg("data.prepare.readable")
    opened = msg("core.owner.opened", folder=shlex.quote(str(folder)), owner=user)
    fixes = [opened, own_copy()] if isinstance(error, PermissionError) else []
    return UserError(Problem("data.unreadable", what, allowed, fixes), Exit.RESOURCES)


def own_copy() -> str:
    """The command for a user who may not use the folder of prepared data."""
    return msg("data.prepare.own_copy", command=project.own_copy())


def _shards(prepared: PreparedCorpus, part: str) -> Iterator[tuple[Path, int]]:
    yield from zip(
        prepared.train if part == "train" else prepared.val, prepared.sizes(part), strict=True
    )
