"""Text → token shards on the disk, once per corpus. Whoever comes second finds them; nobody sees half of them.

    data/<name>-<fingerprint>/train.bin  val.bin    little-endian uint16 tokens, memory-mapped by the loader
                              index.json            sizes and checksums; the folder appears whole, by one rename
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from training import rundir
from training.data import tokenizer
from training.data.corpus import Source
from training.errors import Problem, UserError

FORMAT = 1
TOKEN_BYTES = 2
# One document in twenty is for validation; when that gives no sensible share (few or one huge document), the last
# twentieth of all tokens.
VALIDATION_ONE_IN = 20
SENSIBLE_SHARE = (0.01, 0.20)
CHUNK = 1 << 22


@dataclass(frozen=True)
class Prepared:
    """A corpus on the disk, in tokens."""

    folder: str
    name: str
    documents: int
    train_tokens: int
    val_tokens: int

    @property
    def train(self) -> Path:
        return Path(self.folder, "train.bin")

    @property
    def val(self) -> Path:
        return Path(self.folder, "val.bin")


def fingerprint(source: Source, text_field: str) -> str:
    """Changes whenever a file of the corpus does (path, size or time)."""
    digest = hashlib.sha256(f"{FORMAT} {text_field}".encode())
    for file in source.files:
        facts = file.stat()
        digest.update(f"\0{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:12]


def ensure(source: Source, text_field: str, cache: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Prepared:
    """The prepared corpus, made when it is not there. `progress(bytes done, bytes in all)`.

    Raises UserError for text that can not be used, OSError for a full disk.
    """
    short = os.fsdecode(os.fsencode(source.name)[:100])  # room for the rest within the 255 bytes of a file name
    folder = cache / f"{short}-{fingerprint(source, text_field)}"
    found = _existing(folder)
    if found:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second waits and finds it done
        found = _existing(folder)
        if found:
            return found
        work = cache / f".{folder.name}.work"  # always the same: what a killed one left is removed
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _write(source, text_field, work, folder, progress)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    made = _existing(folder)
    assert made, f"{folder} was written just now"
    return made


def _existing(folder: Path) -> Prepared | None:
    index = rundir.read_json(folder / "index.json")
    if not index or index.get("format") != FORMAT:
        return None
    prepared = Prepared(str(folder), index["name"], index["documents"], index["train_tokens"], index["val_tokens"])
    for path, tokens in ((prepared.train, prepared.train_tokens), (prepared.val, prepared.val_tokens)):
        if not path.exists() or path.stat().st_size != tokens * TOKEN_BYTES:
            return None  # truncated: made again
    return prepared


def _write(source: Source, text_field: str, work: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    documents = done = 0
    train, val = work / "train.bin", work / "val.bin"
    with train.open("wb") as train_file, val.open("wb") as val_file:
        for text, consumed in _documents(source, text_field):
            chosen = zlib.crc32(str(documents).encode()) % VALIDATION_ONE_IN == 0
            (val_file if chosen else train_file).write(tokenizer.encode(text))
            documents += 1
            done += consumed
            progress(done, source.total_bytes)
    sizes = train.stat().st_size, val.stat().st_size
    if not sum(sizes):
        raise UserError(Problem(f"data {source.name}: no text in {len(source.files)} files", "some text"))
    if not SENSIBLE_SHARE[0] <= sizes[1] / sum(sizes) <= SENSIBLE_SHARE[1]:
        _cut_tail(train, val)
    tokens = {f"{p.stem}_tokens": p.stat().st_size // TOKEN_BYTES for p in (train, val)}
    for path in (train, val):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    made = Prepared(str(folder), source.name, documents, **tokens)
    checksums = {f"{p.stem}_sha256": _sha256(p) for p in (train, val)}
    rundir.write_json(work / "index.json", {"format": FORMAT, **asdict(made), **checksums})


def _documents(source: Source, text_field: str) -> Iterator[tuple[bytes, int]]:
    """(text, bytes read for it): a text file is one document, a .jsonl file one a line."""
    for file in source.files:
        if file.suffix != ".jsonl":
            text = file.read_bytes()
            yield text, len(text)
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _record_text(file, number, line, text_field), len(line)


def _record_text(file: Path, number: int, line: bytes, text_field: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(Problem(f"{file}:{number}: not JSON: {error}", "one JSON object a line")) from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        keys = [k for k, v in record.items() if isinstance(v, str)] if isinstance(record, dict) else []
        fixes = [f"--text_field={shlex.quote(k)}" for k in keys[:3]]
        raise UserError(Problem(f"{file}:{number}: no text under {text_field!r}", "a JSON object with the text in it", fixes))
    return str(record[text_field]).encode("utf-8", "replace")


def _cut_tail(train: Path, val: Path) -> None:
    """Join both parts again and make the last twentieth the validation part."""
    with train.open("ab") as out, val.open("rb") as extra:
        shutil.copyfileobj(extra, out, CHUNK)
    tokens = train.stat().st_size // TOKEN_BYTES
    cut = (tokens - tokens // VALIDATION_ONE_IN) * TOKEN_BYTES
    with train.open("rb") as file, val.open("wb") as out:
        file.seek(cut)
        shutil.copyfileobj(file, out, CHUNK)
    os.truncate(train, cut)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
