"""The last lines of a text file."""

from __future__ import annotations

from pathlib import Path

from training.core.plain_text import one_line

TAIL_BYTES = 1 << 16


def tail(path: Path, lines: int, since: int = 0, most_bytes: int = TAIL_BYTES) -> list[str]:
    """The last `lines` lines of a file after the byte `since`, progress bars as a terminal shows
    them, without control characters; [] if the file cannot be read. `most_bytes`: of its end."""
    try:
        if not path.is_file():  # a pipe
            return []
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - most_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    whole = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return [line for line in map(one_line, whole) if line.strip()][-lines:]
