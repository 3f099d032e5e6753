"""The parts of a log that are read: its head, its end, and around the places of the scan."""

from __future__ import annotations

import re
from collections.abc import Sequence

from training.diagnose.log_line import LogLine, decoded, split
from training.diagnose.scan import LogSpan, Places
from training.diagnose.source import COLOUR, LogSource

AROUND = 16 << 10  # bytes read before and after a place
TAIL = 128 << 10
MOST_WINDOWS = 400


def lines(source: LogSource, places: Places) -> list[LogLine]:
    """In file order; the rest of the log is not read."""
    wanted = {source.since: source.line} | {p.offset: p.line for p in _fewer(places.found)}
    # (start, end, a known offset in it, the number of its line)
    spans: list[tuple[int, int, int, int]] = []
    for offset, number in sorted(wanted.items()):
        start, end = max(source.since, offset - AROUND), offset + AROUND
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]), *spans[-1][2:])
        else:
            spans.append((start, end, offset, number))
    tail = max(source.since, places.size - TAIL)
    if tail <= spans[-1][1]:
        spans[-1] = (spans[-1][0], places.size, *spans[-1][2:])
    else:
        spans.append((tail, places.size, -1, places.lines))
    found: list[LogLine] = []
    for start, end, offset, number in spans:
        found += _window(source, start, end, offset, number)
    return found


def _fewer(places: Sequence[LogSpan]) -> Sequence[LogSpan]:
    if len(places) <= MOST_WINDOWS:
        return places
    return [*places[: MOST_WINDOWS // 4], *places[-3 * MOST_WINDOWS // 4 :]]


def _window(source: LogSource, start: int, end: int, offset: int, number: int) -> list[LogLine]:
    source.file.seek(start)
    raw = source.file.read(end - start)
    known = raw.count(b"\n") if offset < 0 else raw.count(b"\n", 0, offset - start)
    line = number - known
    found = []
    position = start
    for segment in re.split(rb"(\r\n|\n|\r)", raw):
        if segment in (b"\n", b"\r\n"):
            line += 1
        elif segment.strip():
            found.append(_line(segment, line, position))
        position += len(segment)
    if start > source.since and found and found[0].offset == start:
        del found[0]  # its start is missing
    return found


def _line(segment: bytes, number: int, offset: int) -> LogLine:
    raw = decoded(COLOUR.sub(b"", segment) if b"\x1b" in segment else segment)
    text, rank = split(raw.removeprefix("\ufeff"))
    return LogLine(number, text, rank, raw, offset)
