"""Incremental reader of a growing .jsonl file (complete lines only), and helpers that narrow JSON
of unknown shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from training.core import json_text, rundir

# JSON from another program, a person or another version of Duet: readers check every value.
Record = dict[str, Any]
RENAMED = {"own_ms": "compute_ms"}  # written by early 0.1
# Bytes. More new bytes than WHOLE are sampled instead of parsed line by line, and beyond 2 *
# SEARCHED not even searched at first: a gigabyte must not delay the first screen.
WHOLE, END, BLOCK, SAMPLES, SEARCHED = 1 << 19, 1 << 18, 1 << 22, 512, 1 << 26


class Tail:
    """Reader of new lines. `keep`: lines that contain these bytes are always parsed (in a very long
    file by `earlier`); the other lines of a long file are sampled, and its end is read."""

    def __init__(self, path: Path, keep: bytes = b"") -> None:
        self.path, self.keep = path, keep
        self._offset, self._inode = 0, -1
        self._unsearched = 0  # bytes at the beginning that were only sampled

    def read(self) -> tuple[list[Record], bool]:
        """New records in file order, and whether the file was replaced (earlier records are
        invalid)."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                fresh = facts.st_ino != self._inode or facts.st_size < self._offset
                if fresh:
                    self._offset, self._inode, self._unsearched = 0, facts.st_ino, 0
                lines = (
                    self._sample(file, facts.st_size - SEARCHED)
                    if self.keep and facts.st_size - self._offset > 2 * SEARCHED
                    else []
                )
                lines += (
                    self._skim(file, facts.st_size - END)
                    if self.keep and facts.st_size - self._offset > WHOLE
                    else []
                )
                file.seek(self._offset)
                text = file.read()
        except OSError:  # not there yet, or no longer
            fresh, self._offset, self._inode, self._unsearched = self._inode != -1, 0, -1, 0
            return [], fresh
        end = text.rfind(b"\n") + 1  # an incomplete last line is left for the next call
        self._offset += end
        lines += text[:end].splitlines()
        return [r for r in map(parse, lines) if r is not None], fresh

    def earlier(self) -> list[Record]:
        """Records with `keep` from the next unsearched piece, newest piece first; [] at the end."""
        if not self._unsearched:
            return []
        start = max(0, self._unsearched - SEARCHED)
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                text = file.read(self._unsearched - start)
        except OSError:
            text, start = b"", 0
        begin = text.find(b"\n") + 1 if start else 0  # the line before belongs to the next piece
        self._unsearched = start + begin if begin < len(text) else start
        lines, place = [], text.find(self.keep, begin)
        while place >= 0:
            stop = text.find(b"\n", place)
            lines.append(text[text.rfind(b"\n", 0, place) + 1 : stop if stop >= 0 else len(text)])
            place = text.find(self.keep, stop) if stop >= 0 else -1
        return [r for r in map(parse, lines) if r is not None]

    @property
    def searched(self) -> bool:
        return not self._unsearched

    def _sample(self, file: BinaryIO, until: int) -> list[bytes]:
        """Evenly spaced lines from the offset to about `until`; moves the offset to the start of
        the next line."""
        lines: list[bytes] = []
        for number in range(SAMPLES):
            file.seek(self._offset + (until - self._offset) * number // SAMPLES)
            if number:
                file.readline(BLOCK)
            lines.append(file.readline(BLOCK))
        file.seek(until)
        file.readline(BLOCK)
        self._offset = self._unsearched = file.tell()
        return lines

    def _skim(self, file: BinaryIO, until: int) -> list[bytes]:
        """Evenly spaced lines and all with `keep`, from the offset to about `until`; moves the
        offset to the start of the next line."""
        stride = max(1, (until - self._offset) // SAMPLES)
        lines: list[bytes] = []
        while self._offset < until:
            file.seek(self._offset)
            block = file.read(min(BLOCK, until - self._offset))
            size = block.rfind(b"\n") + 1
            if not size and len(block) < BLOCK:  # only the beginning of the next line is left
                break
            size = size or BLOCK  # a block without a line break is not Duet's output
            starts = {block.rfind(b"\n", 0, place) + 1 for place in range(0, size, stride)}
            place = block.find(self.keep, 0, size)
            while place >= 0:
                starts.add(block.rfind(b"\n", 0, place) + 1)
                place = block.find(self.keep, place + 1, size)
            lines += [block[start : block.find(b"\n", start)] for start in sorted(starts)]
            self._offset += size
        return lines


def read_object(path: Path) -> Record | None:
    """rundir.read_json, for files that may hold anything."""
    try:
        return rundir.read_json(path)
    except RecursionError:
        return None


def read_figures(path: Path) -> Record | None:
    """read_object() of a summary, whose figures may be NaN or infinite."""
    found: Record | None = json_text.numbers(read_object(path))
    return found


def mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def parse(line: bytes) -> Record | None:
    """A record with current field names, or None."""
    try:
        record = json_text.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    for old, name in RENAMED.items():
        if old in record:
            record.setdefault(name, record.pop(old))
    return record


def number(value: Any) -> float | None:
    """A number, NaN and infinity included, or None."""
    return value if isinstance(value, float) else whole(value)


def whole(value: Any) -> int | None:
    """An integer of at most 63 bits, or None."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
        else None
    )


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def dig(value: Any, *keys: str) -> Any:
    """value[key][key]…, or None where a key is missing or a value is not an object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
