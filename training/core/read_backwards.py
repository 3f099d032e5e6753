"""Records of a JSON-lines file from last to first, some megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.core import json_text
from training.core.jsonl import Record, parse

BLOCK = 1 << 22  # bytes
LINES = 256  # parsed together


def count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except OSError:
        return 0


def backwards(path: Path) -> Iterator[Record]:
    """Records from last to first, without incomplete ones (a crash, a write in progress)."""
    for lines in _blocks(path):
        for end in range(len(lines), 0, -LINES):
            some = lines[max(0, end - LINES) : end]
            yield from reversed(_parsed(some))


def _blocks(path: Path) -> Iterator[list[bytes]]:
    """The lines of each block, the last block first."""
    try:
        with path.open("rb") as file:
            place, rest = file.seek(0, 2), b""
            while place > 0:
                size = min(BLOCK, place)
                place -= size
                file.seek(place)
                text = file.read(size) + rest
                cut = text.find(b"\n") + 1 if place else 0
                # the line starts in an earlier block; a line without an end is dropped
                if place and (not cut or len(text) > 4 * BLOCK):
                    rest = text if len(text) <= 4 * BLOCK else b""
                    continue
                rest = text[:cut]
                yield text[cut:].split(b"\n")
    except OSError:
        return


def _parsed(lines: list[bytes]) -> list[Record]:
    """Parses all lines together, which is faster, or one by one if a line is invalid."""
    lines = [line for line in lines if line]
    try:
        records = json_text.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        records = []
    if len(records) == len(lines) and all(isinstance(record, dict) for record in records):
        return list(records)
    return [record for line in lines if (record := parse(line)) is not None]
