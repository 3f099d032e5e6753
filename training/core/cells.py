"""Width of text in a terminal: Chinese characters take two columns."""

from __future__ import annotations

import unicodedata


def cells(text: str) -> int:
    """Terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text in at least `width` columns; `right`: at the right edge."""
    spaces = " " * (width - cells(text))
    return spaces + text if right else text + spaces
