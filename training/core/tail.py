"""The last lines of a text file, and what was added to one since."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from training.core.plain_text import one_line

TAIL_BYTES = 1 << 16


def within(size: int, since: int) -> int:
    """A remembered place of a file of this size: the begin if it was truncated since, as by the
    rotation of logs (copytruncate)."""
    return since if since <= size else 0


def log_sizes(folder: Path) -> dict[Path, int]:
    """The present end of each log in a folder; rotation may remove one meanwhile."""
    sizes = {}
    for log in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            sizes[log] = log.stat().st_size
    return sizes


def tail(path: Path, lines: int, since: int = 0, most_bytes: int = TAIL_BYTES) -> list[str]:
    """The last `lines` lines of a file after the byte `since`, progress bars as a terminal shows
    them, without control characters; [] if the file cannot be read. `most_bytes`: of its end."""
    try:
        if not path.is_file():  # a pipe
            return []
        with path.open("rb") as file:
            return last_lines(file, lines, since, most_bytes)
    except OSError:
        return []


def last_lines(
    file: IO[bytes], lines: int, since: int = 0, most_bytes: int = TAIL_BYTES
) -> list[str]:
    """As tail(), of an open file. Raises OSError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(within(size, since), size - most_bytes))
    text = file.read().decode("utf-8", "replace")
    whole = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return [line for line in map(one_line, whole) if line.strip()][-lines:]
