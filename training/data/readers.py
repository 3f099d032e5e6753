"""Documents of a corpus, streamed: no more than one line or some rows of a file are in memory.

A text file is one document; each line of .jsonl and row of .parquet is one. Unreadable content is
a problem with file and line; nothing is skipped or guessed.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import shlex
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import encoding, parquet_file
from training.data.corpus import CorpusSource
from training.data.zstandard_file import Damaged, Decompressed

PIECE = 1 << 18  # maximum bytes of a piece; longer documents are split
MAX_LINE = 1 << 30  # a longer line is not valid .jsonl
CONTINUED = 0b10 << 6  # the two highest bits of a byte that continues an UTF-8 character


class DocumentPart(NamedTuple):
    """A document, or a part of a long one."""

    content: bytes
    first: bool = True  # begins a document
    done: int = 0  # bytes read so far of all files of the source


def documents(source: CorpusSource, text_field: str) -> Iterator[DocumentPart]:
    """All documents in the order of the files, in UTF-8. Raises UserError."""
    before = 0
    for number, file in enumerate(source.files):
        try:
            size = file.stat().st_size
            for content, first, done in _pieces_of(file, size, text_field, source.encoding):
                yield DocumentPart(content, first, before + min(done, size))
        except encoding.NotUtf8 as found:
            raise UserError(
                encoding.problems([found, *_also_not_utf8(source.files[number + 1 :])])
            ) from None
        except OSError as error:
            raise UserError(
                Problem(
                    "data.unreadable",
                    msg("data.reader.unreadable", file=file, error=error.strerror or error),
                    msg("data.corpus.readable"),
                )
            ) from None
        before += size


def _pieces_of(file: Path, size: int, text_field: str, name: str) -> Iterator[DocumentPart]:
    """The pieces of one file; `done` counts bytes of this file. `name`: the encoding if not
    UTF-8."""
    form, suffix = _form(file), file.suffix.lower()
    if not size and suffix in (".gz", ".zst", ".parquet"):
        raise UserError(
            Problem(
                "data.damaged",
                msg("data.reader.empty", file=file, suffix=suffix),
                msg("data.reader.complete"),
            )
        )
    if form == ".txt":
        yield from _text(file, name)
        return
    for content, done in (
        _json_lines(file, text_field, name)
        if form == ".jsonl"
        else parquet_file.texts(file, size, text_field)
    ):
        if len(content) < PIECE:
            yield DocumentPart(content, True, done)
        else:
            yield from (
                DocumentPart(piece, number == 0, done)
                for number, piece in enumerate(pieces(io.BytesIO(content)))
            )


def _text(file: Path, name: str) -> Iterator[DocumentPart]:
    done = before = lines = 0
    with _opened(file, name) as (text, raw):
        for number, piece in enumerate(_checked(_without_mark(text), file)):
            if not encoding.is_utf8(piece):
                raise encoding.NotUtf8(file, str(file), piece, before + _mark(file), lines)
            before, lines = before + len(piece), lines + piece.count(b"\n")
            done = done + len(piece) if raw is text else raw.tell()
            yield DocumentPart(piece, number == 0, done)


def _without_mark(file: BinaryIO) -> Iterator[bytes]:
    """The pieces of a text file without its byte-order mark, as Notepad writes it: the mark is not
    text, and the readers of other formats drop it too."""
    begun = file.read(len(codecs.BOM_UTF8))
    yield from pieces(file, b"" if begun == codecs.BOM_UTF8 else begun)


def _mark(file: Path) -> int:
    """The length of its byte-order mark."""
    with _opened(file) as (text, _):
        mark = codecs.BOM_UTF8
        return len(mark) if text.read(len(mark)) == mark else 0


def _also_not_utf8(files: Sequence[Path]) -> Iterator[encoding.NotUtf8]:
    """Files not read yet whose beginning is not UTF-8 either."""
    for file in files:
        if _form(file) == ".parquet":
            continue
        with (
            contextlib.suppress(OSError, EOFError, zlib.error, Damaged),
            _opened(file) as (text, _),
        ):
            if not encoding.is_utf8(piece := next(pieces(text))):
                yield encoding.NotUtf8(file, str(file), piece)


def pieces(file: BinaryIO, begun: bytes = b"") -> Iterator[bytes]:
    """A text in pieces of at most PIECE bytes, cut at line ends or, in a huge line, between
    characters. `begun`: bytes that were read already.

    The cuts depend only on the text, so a text gives the same pieces from any file. At least one
    piece.
    """
    text, first = begun, True
    while True:
        block = file.read(PIECE - len(text))
        text += block
        if not block:
            if text or first:
                yield text
            return
        if len(text) == PIECE:
            end = text.rfind(b"\n") + 1 or _between_characters(text)
            yield text[:end]
            text, first = text[end:], False


def _between_characters(text: bytes) -> int:
    """Where to cut without splitting the last character; bytes that are not UTF-8 are cut
    anywhere."""
    for end in range(len(text) - 1, len(text) - 5, -1):
        if text[end] & 0b11 << 6 != CONTINUED:
            return end
    return len(text)


def _form(file: Path) -> str:
    """Format of the content: .jsonl, .parquet, or .txt for any other text."""
    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    return (
        ".jsonl" if name.endswith(".jsonl") else ".parquet" if name.endswith(".parquet") else ".txt"
    )


# ── compressed files
# ─────────────────────────────────────────────────────────────────────────────────────────────────


class _opened:
    """(content, file): the same object unless the file is compressed or decoded; the position in
    `file` is the number of bytes read.

    `name`: encoding to use if the whole file is not UTF-8; "": the file is not checked.
    """

    def __init__(self, file: Path, name: str = "") -> None:
        decode = name and not _is_utf8(file)
        self.raw: BinaryIO = file.open("rb")
        self.content: BinaryIO = self.raw
        if file.suffix.lower() == ".gz":
            self.content = gzip.GzipFile(fileobj=self.raw)  # type: ignore[assignment]
        elif file.suffix.lower() == ".zst":
            self.content = io.BufferedReader(Decompressed(self.raw), 1 << 16)
        if decode:
            self.content = io.BufferedReader(encoding.Decoded(self.content, name), 1 << 16)

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        return self.content, self.raw

    def __exit__(self, *error: object) -> None:
        self.content.close()
        self.raw.close()


def _is_utf8(file: Path) -> bool:
    with _opened(file) as (text, _):
        return all(map(encoding.is_utf8, _checked(pieces(text), file)))


def _checked(items: Iterator[Any], file: Path) -> Iterator[Any]:
    """Pass on `items`; a damaged file becomes a problem with the last readable position."""
    count = 0
    try:
        for item in items:
            count += 1
            yield item
    except (gzip.BadGzipFile, EOFError, zlib.error, Damaged) as error:
        what = "Zstandard" if file.suffix.lower() == ".zst" else "gzip"
        where = msg("data.reader.after_line", count=count) if _form(file) == ".jsonl" else ""
        raise UserError(
            Problem(
                "data.damaged",
                msg("data.reader.damaged", file=file, what=what, where=where, error=error),
                msg("data.reader.compressed_again"),
            )
        ) from None
    except UnicodeDecodeError as error:
        what = msg("data.reader.neither", file=file, encoding=error.encoding)
        raise UserError(
            Problem(
                "data.encoding",
                what,
                msg("data.reader.that_encoding"),
                [f"file {shlex.quote(str(file))}"],
            )
        ) from None


# ── formats with many documents
# ─────────────────────────────────────────────────────────────────────────────────────────


def _json_lines(file: Path, text_field: str, name: str) -> Iterator[tuple[bytes, int]]:
    position = before = 0
    with _opened(file, name) as (lines, raw):
        for number, line in enumerate(
            _checked(iter(lambda: lines.readline(MAX_LINE + 1), b""), file), 1
        ):
            if len(line) > MAX_LINE:
                raise UserError(
                    Problem(
                        "data.line_too_long",
                        msg(
                            "data.reader.line_too_long", file=file, number=number, MAX_LINE=MAX_LINE
                        ),
                        msg("data.reader.object_per_line"),
                    )
                )
            position = position + len(line) if raw is lines else raw.tell()
            if not encoding.is_utf8(line):
                raise encoding.NotUtf8(file, f"{file}:{number}", line, before, number - 1)
            before += len(line)
            if line.strip():
                yield _record_text(f"{file}:{number}", line, text_field), position


def _record_text(where: str, line: bytes, text_field: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as found:
        error: Exception | str = found
        if isinstance(found, json.JSONDecodeError):  # whose own line is always 1
            error = msg("data.reader.at_column", error=found.msg, column=found.colno)
        raise UserError(
            Problem(
                "data.not_json",
                msg("data.reader.not_json", where=where, error=error),
                msg("data.reader.object_per_line"),
            )
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        keys = (
            [k for k, v in record.items() if isinstance(v, str)] if isinstance(record, dict) else []
        )
        raise UserError(
            Problem(
                "data.no_text_field",
                msg("data.reader.no_field", where=where, text_field=text_field),
                msg("data.reader.with_field"),
                parquet_file.text_fields(keys),
            )
        )
    try:
        return str(record[text_field]).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        what = msg("data.reader.half_character", where=where, text_field=text_field, half=half)
        raise UserError(
            Problem("data.not_unicode", what, msg("data.reader.whole_characters"))
        ) from None
