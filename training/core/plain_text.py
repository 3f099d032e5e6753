"""Text of other programs (log lines, exceptions, command lines) for a terminal: without what would
move the cursor, erase or recolour the screen."""

from __future__ import annotations

import re

# compiled at its first use, by `re`
ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[ -/]*[0-~])"
_KEPT = "\n\t"


def without_escapes(text: str) -> str:
    return re.sub(ESCAPE, "", text) if "\x1b" in text else text


def one_line(text: str) -> str:
    """Without line breaks and other control characters."""
    return text if text.isprintable() else _printable(text, "")


def plain(text: str) -> str:
    """The same for a text of several lines."""
    return text if text.isprintable() else _printable(text, _KEPT)


def shortened(text: str, most: int) -> str:
    """At most this many characters; what is cut ends with `…`, after a whole word if one ends in
    the last third."""
    if len(text) <= most:
        return text
    end = text.rfind(" ", 2 * most // 3, most)
    return f"{text[: end if end > 0 else most - 1].rstrip()}…"


def _printable(text: str, kept: str) -> str:
    return "".join(_shown(c, kept) for c in without_escapes(text))


def _shown(c: str, kept: str) -> str:
    if c.isprintable() or c in kept:
        return c
    return "?" if "\ud800" <= c <= "\udfff" else " "  # a byte that is not UTF-8
