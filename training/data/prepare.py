"""Text → token shards on disk, once per corpus and tokenizer. Later starts verify and reuse them.

data/<name>-<fingerprint>/train_00000.bin …  val_00000.bin …    little-endian tokens, memory-mapped
                                             by the loader
                          tokenizer.json or ranks.tiktoken      of a learned vocabulary
                          index.json                            sizes and checksums; the folder
                                                                appears complete, by one rename
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from training.core import file_lock, log, rundir, units
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import corpus, parquet_file, shards, tokenizer, tokenizer_base, work_folders
from training.data.corpus import CorpusSource
from training.data.encoding import python_name
from training.data.prepared_corpus import FORMAT, SHARD_TOKENS, PreparedCorpus, existing
from training.data.readers import DocumentPart, documents
from training.data.shards import Writer
from training.data.tokenizer_base import BYTES, Tokenizer

# One document in twenty is for validation; if that share is out of range (few documents or a huge
# one), the last twentieth of all tokens.
VALIDATION_ONE_IN = 20
SENSIBLE_SHARE = (0.01, 0.20)
# A vocabulary is learned from this much text, drawn from the whole corpus: more only takes longer.
LEARN_BYTES = 256 << 20
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # of a rename to a folder that is not empty
COMPRESSION = 4  # an estimate, used for that draw only
PROBE = "Hello World, it's 12345!\n\tnaïve – 训练 данные 🙂  x = [1]\n"

Progress = Callable[[str, int, int], None]  # activity, bytes done, total bytes
# Activities, for Progress.
TOKENIZING, CHECKING, LEARNING, MERGING = "tokenizing", "checking", "learning", "merging"


def silent(what: str, done: int, total: int) -> None:
    """Progress callback that ignores its arguments."""


def fingerprint(
    source: CorpusSource, text_field: str, chosen: str = BYTES, vocab_size: int = 0
) -> str:
    """A hash that changes with every file of the corpus (path, size, time) and with the tokenizer
    (choice, size, content)."""
    digest = hashlib.sha256(f"{FORMAT} {SHARD_TOKENS} {text_field}".encode())
    if chosen == tokenizer_base.BPE:
        digest.update(f"\0bpe {vocab_size}".encode())
    elif chosen != BYTES:
        digest.update(b"\0" + hashlib.sha256(tokenizer.expanded(chosen).read_bytes()).digest())
    if source.encoding:
        digest.update(f"\0encoding {python_name(source.encoding)}".encode())
    for file in source.files:
        facts = file.stat()
        digest.update(
            f"\0{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode(
                "utf-8", "surrogateescape"
            )
        )
    return digest.hexdigest()[:12]


def folder_of(
    source: CorpusSource, text_field: str, cache: Path, chosen: str = BYTES, vocab_size: int = 0
) -> Path:
    """The folder of the prepared corpus, which need not exist."""
    # leaves room for the rest within the 255 bytes of a file name
    short = os.fsdecode(os.fsencode(source.name)[:100])
    return cache / f"{short}-{fingerprint(source, text_field, chosen, vocab_size)}"


def ensure(
    source: CorpusSource,
    text_field: str,
    cache: Path,
    progress: Progress = silent,
    *,
    chosen: str = BYTES,
    vocab_size: int = 0,
) -> PreparedCorpus:
    """The prepared corpus, made if it is missing or damaged. `chosen` and `vocab_size`: as
    --tokenizer and --vocab_size.

    Raises UserError for unusable text or an unusable tokenizer, OSError for a full disk.
    """
    work_folders.remove_abandoned(cache)
    before = corpus.states(source)
    folder = folder_of(source, text_field, cache, chosen, vocab_size)
    found, _ = existing(folder, partial(progress, CHECKING))
    if found:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    # of two runs at once, the second waits and finds the corpus prepared
    waits = partial(log.info, msg("data.prepare.waits", name=source.name))
    with file_lock.alone(work_folders.lock(cache, folder.name), waits) as locked:
        found, damage = existing(folder, partial(progress, CHECKING))
        if found:
            return found
        if damage:
            log.warning(msg("data.prepare.again", folder=folder, damage=damage, name=source.name))
        # the first to finish counts
        work = work_folders.create(cache, folder.name, locked=locked)
        try:
            work_folders.check_room(cache, source, chosen)  # after a leftover is removed
            shown = work_folders.touching(work, progress)
            made = _write(source, text_field, work, folder, shown, chosen, vocab_size)
            if problems := corpus.changed(before, corpus.states(source)):
                raise UserError(problems)
            return _published(work, folder, progress) or made
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _published(work: Path, folder: Path, progress: Progress) -> PreparedCorpus | None:
    """The intact corpus that another run has published meanwhile, which may be in use; None: `work`
    is the folder now. Raises OSError."""
    while True:
        try:
            work.rename(folder)
            return None
        except OSError as error:
            if error.errno not in TAKEN:
                raise
        if found := existing(folder, partial(progress, CHECKING))[0]:
            return found
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)  # a damaged one


def _write(
    source: CorpusSource,
    text_field: str,
    work: Path,
    folder: Path,
    progress: Progress,
    chosen: str,
    vocab_size: int,
) -> PreparedCorpus:
    if problems := parquet_file.check(source.files, text_field):
        raise UserError(problems)
    words = (
        _learn(source, text_field, vocab_size, work, progress)
        if chosen == tokenizer_base.BPE
        else tokenizer.load(chosen)
    )
    _warn_of_loss(words)
    train, val = (Writer(work, part, words.token_bytes, SHARD_TOKENS) for part in ("train", "val"))
    try:
        count, text = _tokenize(source, text_field, words, train, val, progress)
        if not text:
            records = any({".jsonl", ".parquet"} & {*file.suffixes} for file in source.files)
            raise UserError(
                Problem(
                    "data.no_text",
                    msg(
                        "data.prepare.no_text",
                        name=source.name,
                        files=units.plural(len(source.files), "file"),
                    ),
                    msg("data.corpus.some_text"),
                    ["--text_field=NAME"] if records else [],
                )
            )
        if not SENSIBLE_SHARE[0] <= val.tokens / (train.tokens + val.tokens) <= SENSIBLE_SHARE[1]:
            val = _cut_tail(train, val)
        train.close()
        val.close()
    finally:
        train.drop()
        val.drop()
    file = words.save(work)
    density = text / max(1, train.tokens + val.tokens - count)
    facts = (words.name, words.padded_vocab, words.token_bytes, words.bos, SHARD_TOKENS, density)
    made = PreparedCorpus(str(folder), source.name, count, train.tokens, val.tokens, *facts)
    paths = [*train.paths, *val.paths, *([work / file] if file else [])]
    found = shards.sums(paths, lambda done, total: progress(CHECKING, done, total))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": found[n]}
        for n, path in enumerate(paths)
    }
    for writer in (train, val):
        for path, tokens in zip(
            writer.paths, shards.sizes(writer.tokens, SHARD_TOKENS), strict=True
        ):
            files[path.name]["tokens"] = tokens
    rundir.write_json(
        work / "index.json",
        {"format": FORMAT, **asdict(made), "tokenizer_file": file, "files": files},
    )
    return made


def for_validation(document: int) -> bool:
    """Whether the document with this number belongs to the validation part."""
    return zlib.crc32(str(document).encode()) % VALIDATION_ONE_IN == 0


def _tokenize(
    source: CorpusSource,
    text_field: str,
    words: Tokenizer,
    train: Writer,
    val: Writer,
    progress: Progress,
) -> tuple[int, int]:
    """Tokenize every document into one of the two parts. Returns the number of documents and of
    their bytes."""
    count, done, text = 0, 0, 0
    seen: deque[DocumentPart] = deque()  # pieces that are being tokenized

    def noted() -> Iterator[DocumentPart]:
        nonlocal text
        for piece in documents(source, text_field):
            text += len(piece.content)
            seen.append(piece._replace(content=b""))
            yield piece

    pieces = noted()
    for tokens in words.encode_pieces(pieces):
        piece = seen.popleft()
        count += piece.first
        (val if for_validation(count - 1) else train).write(tokens)
        done = piece.done
        progress(TOKENIZING, done, source.total_bytes)
    if done != source.total_bytes and count:  # the end of a compressed file contains no text
        progress(TOKENIZING, source.total_bytes, source.total_bytes)
    return count, text


def _cut_tail(train: Writer, val: Writer) -> Writer:
    """Join both parts again and make the last twentieth the validation part."""
    for tokens in val.read():
        train.write(tokens)
    val.truncate(0)
    cut = train.tokens - train.tokens // VALIDATION_ONE_IN
    for tokens in train.read(cut):
        val.write(tokens)
    train.truncate(cut)
    return val


def _learn(
    source: CorpusSource, text_field: str, vocab_size: int, work: Path, progress: Progress
) -> Tokenizer:
    """A vocabulary of the training documents, or of an even sample of a large corpus."""
    from training.data import bpe

    guess = sum(
        f.stat().st_size * (COMPRESSION if f.suffix.lower() in (".gz", ".zst", ".parquet") else 1)
        for f in source.files
    )
    share = min(1.0, LEARN_BYTES / max(1, guess))
    learned = total = done = 0

    def texts() -> Iterator[str]:
        nonlocal learned, total, done
        document = -1
        for number, piece in enumerate(documents(source, text_field)):
            document += piece.first
            total += len(piece.content)
            done = piece.done
            progress(LEARNING, done, source.total_bytes)
            drawn = zlib.crc32(b"learn %d" % number) < share * (1 << 32) and learned < LEARN_BYTES
            # the first document may be the only one
            if drawn and not (document and for_validation(document)):
                learned += len(piece.content)
                yield piece.content.decode("utf-8", "replace")

    def waiting() -> None:  # the text is read; the remaining time is unknown
        if done >= source.total_bytes:
            progress(MERGING, done, source.total_bytes)

    words = bpe.train(texts(), vocab_size, work, waiting)
    log.info(
        msg(
            "data.prepare.learned",
            tokens=units.plural(words.vocab, "token"),
            learned=units.size(learned),
            total=units.size(total),
        )
    )
    return words


def _warn_of_loss(words: Tokenizer) -> None:
    (ids,) = words.encode_documents([PROBE])
    text = words.decode(ids.tolist())
    if text != PROBE:
        log.warning(msg("data.prepare.tokenizer_changes", name=words.name, PROBE=PROBE, text=text))
