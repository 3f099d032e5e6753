"""Tables on standard output: on a terminal, or in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from training.core import log
from training.host import program
from training.monitor import term_text
from training.monitor.term_text import Line


def columns() -> int | None:
    """Cells of a line: COLUMNS, or the width of the terminal; None: a pipe, nothing is cut."""
    text = os.environ.get("COLUMNS", "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    # a terminal of unknown size reports 0
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80 if sys.stdout.isatty() else None


def in_ascii(asked: bool, also: str = "") -> bool:
    """Whether to draw in ASCII. `also`: characters that tables do not have."""
    return asked or not (program.shows_chinese() and program.shows(also))


def print_lines(lines: Sequence[Line], width: int | None, *, ascii_only: bool) -> None:
    """`width`: of `columns()`."""
    plain = in_ascii(ascii_only)
    colour = log.colourful(sys.stdout)
    for line in lines:
        wide = term_text.width_of(line) if width is None else width
        print(term_text.render(line, wide, colour=colour, ascii_only=plain).rstrip())
