"""Log files of any encoding, compressed, still growing, or in folders; other modules get whole
lines of bytes."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import errno
import gzip
import itertools
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg

CHUNK = 1 << 20  # bytes
HEAD = 4096
MAGIC = 16  # bytes of a file's magic number
MOST_FILES = 4096  # of a folder
COLOUR = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
)
CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
LINE_END = re.compile(rb"[\r\n]")
NO_LOGS = {
    ".json",
    ".jsonl",
    ".py",
    ".pyc",
    ".yaml",
    ".yml",
    ".html",
    ".md",
    ".csv",
    ".sh",
    ".toml",
    ".cfg",
    ".argv",
    ".env",
    ".stacks",
}
NO_FOLDERS = {
    "checkpoints",
    "tb_logger",
    "wandb",
    "hangs",
    "heartbeat",
    "profile",
    "replaced",
    "samples",
    "tokenizer",
}
FROZEN_CODE = re.compile(r"code(_\d+)?")  # of a SLURM job; its record is beside it
ERROR_FILE = re.compile(r"error\.json$")  # torch's (TORCHELASTIC_ERROR_FILE) and Duet's
BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class Chunk:
    """Whole lines without colour codes. `offset`: of its start in the file, in bytes; `line`:
    number of its first line."""

    def __init__(self, raw: bytes, offset: int, line: int) -> None:
        self.raw, self.offset, self.line = raw, offset, line
        self.data = COLOUR.sub(b"", raw) if b"\x1b" in raw else raw
        self._ends: tuple[list[int], list[int], list[int]] | None = None

    def place(self, position: int) -> tuple[int, int]:
        """(line number, offset in the file) of the segment at this position of `data`; a segment
        starts after \\n or \\r."""
        if self._ends is None:  # not needed for most chunks
            ends = [m.start() for m in LINE_END.finditer(self.data)]
            raw = (
                ends if self.raw is self.data else [m.start() for m in LINE_END.finditer(self.raw)]
            )
            lines = list(itertools.accumulate((self.data[end] == 10 for end in ends), initial=0))
            self._ends = ends, raw, lines
        ends, raw, lines = self._ends
        number = bisect.bisect_left(ends, position)
        return self.line + lines[number], self.offset + (raw[number - 1] + 1 if number else 0)


class LogSource:
    """One log. `name`: for display; `rank`: from the file name; `since`: first byte that is read,
    in line `line`."""

    def __init__(self, path: Path | None, rank: int | None = None, since: int = 0) -> None:
        self.rank, self.since, self.line = rank, since, 1
        self.name = str(path) if path else msg("diagnose.source.stdin")
        self.file = _opened(path)
        self.binary = is_binary(self.file.read(HEAD))
        self.file.seek(0)

    def chunks(self) -> Iterator[Chunk]:
        self.file.seek(self.since)
        offset, line, rest = self.since, self.line, b""
        while block := self.file.read(CHUNK):
            raw = rest + block
            # a \r at the very end may be half of \r\n
            cut = 1 + max(raw.rfind(b"\n"), raw.rfind(b"\r", 0, -1))
            if not cut and len(raw) < 4 * CHUNK:
                rest = raw
                continue
            raw, rest = (raw[:cut], raw[cut:]) if cut else (raw, b"")
            yield Chunk(raw, offset, line)
            offset, line = offset + len(raw), line + raw.count(b"\n")
        if rest:
            yield Chunk(rest, offset, line)

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        self.file.close()


def _opened(path: Path | None) -> IO[bytes]:
    """A seekable text file with lines that end in \\n: the log itself if it is one, else a
    temporary copy. Raises OSError."""
    if path is None and sys.stdin is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    file: IO[bytes] = path.open("rb") if path else sys.stdin.buffer
    if path and path.is_file():
        head = file.read(HEAD)
        file.seek(0)
        if head.startswith(b"\x1f\x8b"):
            with file, gzip.open(file) as unpacked:
                copy = _copy(unpacked)  # type: ignore[arg-type]
            if not os.fstat(copy.fileno()).st_size:
                raise OSError(errno.EINVAL, msg("diagnose.source.damaged_gzip"), str(path))
            return copy
        encoding = wide(head)
        if encoding:
            with file:
                return _narrow(file, encoding)
        return file
    copy = _copy(file)  # a pipe can be read only once
    encoding = wide(copy.read(HEAD))
    copy.seek(0)
    return _narrow(copy, encoding) if encoding else copy


def _copy(file: IO[bytes]) -> IO[bytes]:
    copy = tempfile.TemporaryFile()  # noqa: SIM115  closed with its LogSource
    # a truncated file is a log too
    with contextlib.suppress(EOFError, gzip.BadGzipFile, zlib.error):
        while block := file.read1(CHUNK):  # type: ignore[attr-defined]  # what is read before an error is kept
            copy.write(block)
    copy.flush()
    copy.seek(0)
    return copy


def wide(head: bytes) -> str | None:
    """Encoding of a text with two bytes per character, as Windows shells write it."""
    for bom, encoding in BOMS.items():
        if head.startswith(bom):
            return encoding if encoding.startswith("utf-16") else None
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        half = head[start::2]
        if len(half) > 8 and half.count(0) > 0.7 * len(half) and head.count(0) < 0.75 * len(head):
            return encoding
    return None


def is_binary(head: bytes) -> bool:
    """Whether the first bytes and more than 5 % of all are control characters that neither texts
    nor terminals use. Leading zeros come from a log truncated during writing; a log that ends in
    garbage starts with text."""
    head = head.lstrip(b"\0")
    return CONTROL.search(head[:MAGIC]) is not None and len(CONTROL.findall(head)) > max(
        8, 0.05 * len(head)
    )


def _narrow(file: IO[bytes], encoding: str) -> IO[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    file.seek(2 if file.read(2) in BOMS else 0)
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    while block := file.read(CHUNK):
        copy.write(decoder.decode(block).encode("utf-8", "replace"))
    copy.seek(0)
    return copy


RANK_IN_NAME = (
    re.compile(r"(?:^|[^a-z])(?:global_?)?rank[-_ ]?(\d+)(?!\d)", re.I),
    re.compile(r"attempt_\d+/(\d+)/(?:stdout|stderr|error)"),
    re.compile(r"(?:^|/)(\d+)/(?:stdout|stderr)(?:\.log)?$"),
    re.compile(r"(?:^|/)\d+[._](\d+)\.(?:out|err|log)$"),  # %j_%t
    re.compile(r"slurm-\d+[._](\d+)\.(?:out|err)$"),
    re.compile(r"[-_.]task[-_]?(\d+)", re.I),
)


RANK_ALONE = re.compile(r"(?:^|/)(?:log[-_.]?)?(?:global[-_])?rank[-_.]?(\d+)(?:\.\w+)*$", re.I)


def rank_of(name: str, *, alone: bool = False) -> int | None:
    """Rank in a log's name. `alone`: the only log, so an arbitrary number in its name is not a
    rank."""
    if alone:
        found = RANK_ALONE.search(name)
        return int(found[1]) if found else None
    return next((int(m[1]) for p in RANK_IN_NAME if (m := p.search(name))), None)


def logs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """(logs, error files of torch or Duet) in a folder and below; binary files are skipped."""
    logs: list[Path] = []
    errors: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and _may_hold(parent, f))
        for name in sorted(n for n in names if not n.startswith(".")):
            path = Path(parent, name)
            if ERROR_FILE.search(name):
                errors.append(path)
            elif path.suffix.lower() not in NO_LOGS and path.is_file() and _is_text(path):
                logs.append(path)
    return logs[:MOST_FILES], errors[:MOST_FILES]


def _may_hold(parent: str, folder: str) -> bool:
    """Whether a folder may hold logs; the project's files have logs of its tests."""
    frozen = FROZEN_CODE.fullmatch(folder) and Path(parent, f"{folder}.json").is_file()
    return folder not in NO_FOLDERS and not frozen


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        log.warning(msg("diagnose.source.skipped", path=path, strerror=error.strerror))
        return False
    return bool(head) and (
        head.startswith(b"\x1f\x8b") or wide(head) is not None or b"\0" not in head
    )


def missing(paths: list[Path], near: Callable[[Path], list[str]]) -> UserError | None:
    """All unreadable paths in one error; None if there are none. `near`: commands for a missing
    one."""
    problems = []
    for path in paths:
        if not path.exists():
            problems.append(
                Problem(
                    "log.missing",
                    msg("diagnose.source.missing", path=path),
                    msg("diagnose.source.allowed"),
                    near(path),
                )
            )
        elif not os.access(path, os.R_OK):
            problems.append(Problem("log.unreadable", msg("diagnose.source.unreadable", path=path)))
    return UserError(problems, Exit.CONFIG) if problems else None
