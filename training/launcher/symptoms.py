"""Lines that torch prints about a failed collective on ranks that waited in vain for another one.
They blame the collective ("incorrect usages of collectives"): the log of the rank has them, the
console shows the failure card instead."""

from __future__ import annotations

import re

MARK = b".cpp:"
# [rank0]:[E1128 19:42:14.052472738 ProcessGroupNCCL.cpp:1899], [E ProcessGroupNCCL.cpp:475]; not
# the warnings, which are about the program
_HEAD = re.compile(rb"(?:\[rank\d+\]:)?\[E[\d :.]*ProcessGroup(?:NCCL|Gloo)\.cpp:\d+\]")
# the C++ stack after it, and what the abort of the process prints
_MORE = re.compile(
    rb"Exception raised from |frame #\d+: |terminate called after throwing an instance of 'c10::"
    rb"|  what\(\):  \[(?:PG|Rank) "
)
_EMPTY = (b"", b"\n", b"\r\n")
# the beginning of such a line, cut anywhere
_BEGUN = re.compile(
    rb"(?:\[rank\d+\]:)?\[E[\d :.]*ProcessGroup|\[(?:r(?:a(?:nk?)?)?|rank\d+\]?:?)?$"
    rb"|(?:\[rank\d+\]:)?\[(?:E[\d :.]*(?:P[a-zG]*)?)?$"
)
HELD_BYTES = 1 << 13  # of an unfinished line


class SymptomLines:
    """For the lines of one rank, in their order."""

    def __init__(self) -> None:
        self.inside = False  # the last line was one
        self.dropped = 0

    def rest(self, line: bytes) -> bytes | None:
        """The line without a symptom: b"" or a progress bar before it; None: it has none."""
        if MARK in line and (found := _HEAD.search(line)):
            self.inside = True
            self.dropped += 1
            return line[: found.start()]
        if self.inside and (line in _EMPTY or _MORE.match(line)):
            return b""
        self.inside = False
        return None


class Symptoms:
    """The same for pieces of output, which may end within a line."""

    def __init__(self) -> None:
        self.lines = SymptomLines()
        self._held = b""

    def without(self, piece: bytes) -> bytes:
        """What the console shows now."""
        piece, self._held = self._held + piece, b""
        last = piece[piece.rfind(b"\n") + 1 :]
        if self._may_be_one(last):
            piece, self._held = piece[: len(piece) - len(last)], last
        if not self.lines.inside and MARK not in piece:
            return piece
        return b"".join(map(self._shown, piece.splitlines(keepends=True)))

    def end(self) -> bytes:
        """What is left at the end of the output."""
        held, self._held = self._held, b""
        return self._shown(held) if held else b""

    def _shown(self, line: bytes) -> bytes:
        rest = self.lines.rest(line)
        return line if rest is None else rest

    def _may_be_one(self, line: bytes) -> bool:
        if len(line) > HELD_BYTES or b"\r" in line:
            return False
        return self.lines.inside or (line.startswith(b"[") and _BEGUN.match(line) is not None)
