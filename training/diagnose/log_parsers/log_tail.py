"""New text of a growing log of any size and encoding: all of it, or, above WHOLE bytes, a sample
and the end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from training.core.tail import within
from training.diagnose import log_line
from training.diagnose.source import HEAD, LogSource, wide

# More than WHOLE new bytes are sampled: a gigabyte must not delay the first screen.
WHOLE, BEGIN, END = 1 << 20, 1 << 15, 1 << 18
SAMPLES, WINDOW = 400, 1 << 12  # places, and bytes read at each
ENDING, SHOWN = 1 << 15, 1 << 14  # bytes of the end: read for the outcome, shown
QUIET_S = 2.0  # an incomplete line that has not grown for this time is parsed as it is
BINARY = 0.05  # share of control characters in a binary file
HOLE = 0.6  # share of zeros that no text has in any encoding
GZIP = b"\x1f\x8b"
_SEGMENT = re.compile(r"[^\r\n]+")


@dataclass(frozen=True)
class LogChunk:
    """Segments of consecutive lines (between \\n or \\r), each with its approximate offset in the
    file."""

    segments: list[tuple[int, str]]
    gap: bool  # text before it was skipped
    brief: bool = False  # one of many samples in the middle


class LogText:
    def __init__(self, path: Path, since: int = 0) -> None:
        """`since`: offset of the text to read."""
        self.path, self._since = path, since
        self.whole = True  # nothing skipped so far
        self.there, self.binary = False, False
        self.size, self.mtime = 0, 0.0
        self.end, self.start = "", ""  # of the log, at the last read
        self._offset, self._file = 0, (-1, -1)
        self._encoding = "utf-8"
        self._unpacked: IO[bytes] | None = None

    def read(self, now: float) -> tuple[bool, list[LogChunk]]:
        """(whether the file was replaced or truncated; its new chunks). No chunks if the file is
        gone."""
        try:
            with self.path.open("rb") as file:
                return self._read(file, now)
        except OSError:
            self.there, self._file = False, (-1, -1)
            return False, []

    def _read(self, opened: IO[bytes], now: float) -> tuple[bool, list[LogChunk]]:
        facts = os.fstat(opened.fileno())
        self.there, self.mtime = True, facts.st_mtime
        fresh = (facts.st_dev, facts.st_ino) != self._file or facts.st_size < self._offset
        if fresh:
            self._file = (facts.st_dev, facts.st_ino)
            self._offset, self.whole = within(facts.st_size, self._since), True
            self._unpacked = LogSource(self.path).file if opened.read(2) == GZIP else None
        file = self._unpacked or opened
        self.size = os.fstat(file.fileno()).st_size
        if fresh or not self.start:
            self._look_at_head(file)
        pieces = list(self._pieces(file, now - facts.st_mtime > QUIET_S))
        self.end = self._decoded(self._at(file, self.size - ENDING, ENDING))
        return fresh, pieces

    def _look_at_head(self, file: IO[bytes]) -> None:
        file.seek(0)
        head = file.read(HEAD)
        if head.count(0) > HOLE * len(head):
            head = self._at(file, self.size - HEAD, HEAD)
            zeros = len(head) - len(head.lstrip(b"\0"))
            head = head[zeros - zeros % 2 :]
        self._encoding = wide(head) or "utf-8"
        self.start = self._decoded(head)
        strange = sum(not c.isprintable() and c not in "\r\n\t\x1b\f\b\a" for c in self.start)
        self.binary = strange > BINARY * max(200, len(self.start))

    def _pieces(self, file: IO[bytes], quiet: bool) -> Iterator[LogChunk]:
        if self.binary:
            self._offset = self.size
            return
        begin = self._offset
        if self.size - begin > WHOLE:
            self.whole = False
            if begin == 0:
                yield LogChunk(self._segments(self._at(file, 0, BEGIN), 0, cut=True), False)
            stride = (self.size - END - begin) // SAMPLES
            for number in range(1, SAMPLES):
                place = begin + number * stride
                data = self._at(file, place, WINDOW)
                first = self._line_end(data, first=True)
                yield LogChunk(
                    self._segments(data[first:], place + first, cut=True) if first else [],
                    True,
                    brief=True,
                )
            data = self._at(file, self.size - END, END)
            begin = self.size - len(data)
            first = self._line_end(data, first=True)
            data, begin, gap = data[first:], begin + first, True
        else:
            data, gap = self._at(file, begin, self.size - begin), False
        end = self._line_end(data, first=False)
        self._offset = begin + end
        segments = self._segments(data[:end], begin, cut=False)
        rest = data[end:]
        if len(rest) > END:  # an endless line: each part is read once
            self._offset = self.size
        # The last state of a bar is on an incomplete line, which is read again when complete.
        if rest and (quiet or rest.rstrip().endswith((b"]", b"\x1b[A"))):
            segments += self._segments(rest, self._offset, cut=False)[-1:]
        yield LogChunk(segments, gap)

    def _at(self, file: IO[bytes], place: int, count: int) -> bytes:
        place = max(0, place)
        if self._width() == 2:
            place &= ~1
        file.seek(place)
        return file.read(min(count, max(0, self.size - place)))

    def _width(self) -> int:
        return 2 if self._encoding.startswith("utf-16") else 1

    def _line_end(self, data: bytes, *, first: bool) -> int:
        """Offset after the first or last line end; 0 without any."""
        width, places = self._width(), []
        for end in ("\n", "\r"):
            mark = end.encode(self._encoding)
            place = data.find(mark) if first else data.rfind(mark)
            while place >= 0 and place % width:
                place = (
                    data.find(mark, place + 1) if first else data.rfind(mark, 0, place + width - 1)
                )
            if place >= 0:
                places.append(place + width)
        return (min(places) if first else max(places)) if places else 0

    def _segments(self, data: bytes, begin: int, *, cut: bool) -> list[tuple[int, str]]:
        if cut:
            data = data[: self._line_end(data, first=False)]
        width = self._width()
        return [(begin + width * m.start(), m[0]) for m in _SEGMENT.finditer(self._decoded(data))]

    def _decoded(self, data: bytes) -> str:
        try:
            text = data.decode(self._encoding)
        except UnicodeDecodeError:  # cut within a character, or lines in another encoding
            text = (
                "".join(map(log_line.decoded, data.splitlines(keepends=True)))
                if self._width() == 1
                else data.decode(self._encoding, "replace")
            )
        # \0: a log truncated while its program kept writing at the old offset starts with a hole.
        return text.replace("\0", "").removeprefix("\ufeff")

    def last_lines(self, count: int) -> list[str]:
        """The end as a terminal shows it: the last state of a line that overwrites itself."""
        if self.binary:
            return []
        shown = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in self.end[-SHOWN:].split("\n")]
        return [line for line in shown if line.strip()][-count:]
