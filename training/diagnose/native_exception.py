"""C++ exceptions that nothing caught: the C++ runtime prints type and message, and aborts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from training.diagnose.log_line import LogLine
from training.diagnose.traceback import Traceback

# of libstdc++: two lines, between which another process may print
TYPE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
TEXT = re.compile(r"\s*what\(\): +(?P<text>\S.*)")
BETWEEN = 8  # lines
# of libc++: one line
WHOLE = re.compile(
    r"terminating (?:due to|with) uncaught exception of type (?P<type>[\w:]+): (?P<text>.+)"
)


def read(lines: Sequence[LogLine]) -> list[Traceback]:
    """Their last line is `TYPE: MESSAGE`."""
    found = []
    for index, line in enumerate(lines):
        if whole := WHOLE.search(line.text):
            found.append(_one(line, line, whole["type"], whole["text"]))
        elif head := TYPE.search(line.text):
            for other in lines[index : index + BETWEEN]:
                if other.rank == line.rank and (text := TEXT.search(other.text)):
                    found.append(_one(line, other, head["type"], text["text"]))
                    break
    return found


def _one(start: LogLine, end: LogLine, name: str, message: str) -> Traceback:
    named = replace(end, text=f"{name}: {message}")
    return Traceback(start, named, name, message, last=end.offset, native=True)
