"""Lines that torch prints about a failed collective on ranks that waited in vain for another one.
They blame the collective ("incorrect usages of collectives"): the log of the rank has them, the
console shows the failure card instead."""

from __future__ import annotations

import re

MARK = b".cpp:"
# [rank0]:[E1128 19:42:14.052472738 ProcessGroupNCCL.cpp:1899], [E ProcessGroupNCCL.cpp:475]; not
# the warnings, which are about the program
_HEAD = re.compile(rb"(?:\[rank\d+\]:)?\[E[\d :.]*ProcessGroup(?:NCCL|Gloo)\.cpp:\d+\]")
# after it: the stack in C++ and that of the collective, and torch's hints about any CUDA error
_STACK = re.compile(
    rb"Exception raised from |frame #\d+: |#\d+ .+ from |Search for `(?:cuda|hip)"
    rb"|(?:CUDA|HIP) kernel errors might|For debugging consider|Compile with `TORCH_USE"
    rb"|Device-side assertion tracking"
)
# the error of NCCL, and what the abort of the process prints
_MORE = re.compile(
    rb"nccl[A-Z]\w+: |Last error:|terminate called after throwing an instance of 'c10::"
    rb"|  what\(\):  \[(?:PG|Rank) "
)
_LAST_ERROR = re.compile(rb"Last error:\s*")  # it is the next line
_EMPTY = (b"", b"\n", b"\r\n")
# the beginning of such a line, cut anywhere
_BEGUN = re.compile(
    rb"(?:\[rank\d+\]:)?\[E[\d :.]*ProcessGroup|\[(?:r(?:a(?:nk?)?)?|rank\d+\]?:?)?$"
    rb"|(?:\[rank\d+\]:)?\[(?:E[\d :.]*(?:P[a-zG]*)?)?$"
)
HELD_BYTES = 1 << 13  # of an unfinished line


class SymptomLines:
    """For the lines of one rank, in their order."""

    def __init__(self, *, inside: bool = False) -> None:
        self.inside = inside  # the last line was one
        self._continued = False  # whatever the next line is
        self.dropped = 0

    def rest(self, line: bytes) -> bytes | None:
        """The line without a symptom: b"" or a progress bar before it; None: it has none."""
        if MARK in line and (found := _HEAD.search(line)):
            self.inside, self._continued = True, False
            self.dropped += 1
            return line[: found.start()]
        if self.inside and (
            self._continued or line in _EMPTY or _STACK.match(line) or _MORE.match(line)
        ):
            self._continued = _LAST_ERROR.fullmatch(line) is not None
            return b""
        self.inside = self._continued = False
        return None

    def of_stack(self, line: bytes) -> bool:
        """Does the line only show where such an error was raised?"""
        return self.rest(line) == b"" and _STACK.match(line) is not None


class Symptoms:
    """The same for pieces of output, which may end within a line."""

    def __init__(self) -> None:
        self.lines = SymptomLines()
        self._held = b""

    def without(self, piece: bytes) -> bytes:
        """What the console shows now."""
        piece, self._held = self._held + piece, b""
        end = piece.rfind(b"\n") + 1
        shown, last = self._shown(piece[:end]), piece[end:]
        if self._may_be_one(last):
            self._held = last
            return shown
        return shown + self._shown(last)

    def end(self) -> bytes:
        """What is left at the end of the output."""
        held, self._held = self._held, b""
        return self._shown(held)

    def _shown(self, text: bytes) -> bytes:
        if not self.lines.inside and MARK not in text:
            return text
        rests = ((line, self.lines.rest(line)) for line in text.splitlines(keepends=True))
        return b"".join(line if rest is None else rest for line, rest in rests)

    def _may_be_one(self, line: bytes) -> bool:
        if len(line) > HELD_BYTES or b"\r" in line:
            return False
        return self.lines.inside or (line.startswith(b"[") and _BEGUN.match(line) is not None)
