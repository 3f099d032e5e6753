"""Text in terminal cells: widths, colours, bars, curves; independent of runs.

Everything is drawn in Unicode; for ASCII terminals each character is replaced by a similar one.
"""

from __future__ import annotations

import math
import re

from training.core.cells import cells
from training.core.plain_text import without_escapes

# A line is a list of (text, style): its width is computed before colours are added.
Line = list[tuple[str, str]]
STYLES = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "1;31", "info": "36"}
LEVELS = "▁▂▃▄▅▆▇█"
FULL, EMPTY = "█░"
_ASCII = str.maketrans("▁▂▃▄▅▆▇█░│·…→≥×–°", "__..::##-||~>>x- ")
# In Chinese text a line may end after any character, but not before closing punctuation.
_WIDE = r"[\u2e80-\u9fff\uff00-\uffef]"
# compiled at their first use, by `re`
_WORD = rf" +|[（《]*(?:{_WIDE}|(?:(?!{_WIDE})[^ ])+)[，。：；、！？）》]*"


def clean(text: str) -> str:
    """Untrusted text (log lines, names) without control sequences."""
    if text.isprintable():
        return text
    text = without_escapes(text).expandtabs(4)
    return "".join(
        "?" if "\ud800" <= c <= "\udfff" else c
        for c in text
        if c.isprintable() or "\ud800" <= c <= "\udfff"
    )


def to_ascii(text: str) -> str:
    """In as many cells."""
    text = text.translate(_ASCII)
    return text if text.isascii() else "".join(c if c.isascii() else "?" * cells(c) for c in text)


def cut(text: str, width: int) -> str:
    """At most `width` cells; '…' marks a cut."""
    if cells(text) <= width:
        return text
    out, used = "", 0
    for c in text:
        used += cells(c)
        if used > width - 1:
            break
        out += c
    return out + "…" if width > 0 else ""


def cut_left(text: str, width: int) -> str:
    """The end of a path, its most specific part, in at most `width` cells."""
    if cells(text) <= width or width < 1:
        return text
    end = text[-width:]  # each character takes at least one cell, except combining marks
    while cells(end) > width - 1:
        end = end[1:]
    return "…" + end


def cut_middle(text: str, width: int) -> str:
    """A name cut in the middle, since names mostly differ at their end."""
    if cells(text) <= width or width < 5:
        return cut(text, width)
    begin = cut(text, width // 3).removesuffix("…")
    return begin + cut_left(text, width - cells(begin))


def wrap(line: Line, width: int, indent: int = 0) -> list[Line]:
    """The line in as many rows as needed, broken between words where possible; all rows but the
    first are indented."""
    indent = indent if width > 4 * indent else 0
    rows: list[Line] = [[]]
    room = width
    words = [(word, style) for text, style in line for word in re.findall(_WORD, text)]
    for whole, style in words:
        word = whole
        while cells(word) > room and not word.isspace():
            fits = cells(word) <= width - indent
            if not fits and room >= 8:  # longer than any row: fill this one
                part = cut(word + "…", room + 1).removesuffix("…")
                rows[-1].append((part, style))
                word = word[len(part) :]
            elif not fits and room == width - indent:  # a row of less than 8 cells
                part = word[:1]
                rows[-1].append((part, style))
                word = word[1:]
            rows.append([(" " * indent, "")])
            room = width - indent
        if cells(word) <= room:
            rows[-1].append((word, style))
            room -= cells(word)
    return rows


def width_of(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def rows_of(text: str, width: int) -> int:
    """How many rows the text takes in a terminal that wraps it after any character."""
    rows, room = 1, width
    for c in text:
        if cells(c) > room:
            rows, room = rows + 1, width
        room -= cells(c)
    return rows


def render(line: Line, width: int, *, colour: bool, ascii_only: bool) -> str:
    """The line as text of at most `width` cells."""
    out = ""
    for whole, style in line:
        text = clean(whole)
        piece = cut(to_ascii(text) if ascii_only else text, width)
        piece = to_ascii(piece) if ascii_only else piece  # the mark of a cut
        width -= cells(piece)
        out += f"\x1b[{STYLES[style]}m{piece}\x1b[0m" if colour and style and piece else piece
        if width <= 0:
            break
    return out


def sides(left: Line, right: Line, width: int) -> Line:
    """One part at the left edge, one at the right; the left one is cut if both do not fit."""
    room, short = width - width_of(right) - 1, []
    for text, style in left:
        piece = cut(text, max(0, room))
        room -= cells(piece)
        short.append((piece, style))
    return [*short, (" " * (max(0, room) + 1), ""), *right]


def flow(items: list[Line], width: int, rows: int, gap: str = "   ") -> list[Line]:
    """Items side by side in at most `rows` rows; items that do not fit are omitted, never cut."""
    lines: list[Line] = [[]]
    for item in items:
        used = width_of(lines[-1])
        if used and used + len(gap) + width_of(item) > width:
            if len(lines) == rows:
                break
            lines.append([])
            used = 0
        lines[-1] += ([(gap, "")] if used else []) + item
    return lines if lines[0] else []


def beside(left: list[Line], right: list[Line], left_width: int, gap: int) -> list[Line]:
    """Two blocks next to each other."""
    lines: list[Line] = []
    for row in range(max(len(left), len(right))):
        first = fit(left[row] if row < len(left) else [], left_width)
        lines.append([*first, (" " * gap, ""), *(right[row] if row < len(right) else [])])
    return lines


def fit(line: Line, width: int) -> Line:
    """The line in exactly `width` cells."""
    out: Line = []
    for text, style in line:
        piece = cut(text, width)
        width -= cells(piece)
        out.append((piece, style))
        if width <= 0:
            return out
    return [*out, (" " * width, "")]


def bar(share: float, width: int) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return FULL * full + EMPTY * (width - full)


def plot(values: list[float], low: float, high: float, rows: int) -> list[str]:
    """Bars, one per column, top row first; a value above `high` fills its column, NaN is '×'."""
    steps = len(LEVELS) * rows
    heights = [
        0
        if math.isnan(v)
        else 1 + round(min(1.0, max(0.0, (v - low) / (high - low or 1.0))) * (steps - 1))
        for v in values
    ]
    out = []
    for row in reversed(range(rows)):
        inside = (max(0, min(len(LEVELS), h - row * len(LEVELS))) for h in heights)
        out.append(
            "".join(
                ("×" if row == 0 and h == 0 else " ") if k == 0 else LEVELS[k - 1]
                for k, h in zip(inside, heights, strict=True)
            )
        )
    return out


def spread(points: list[tuple[int, float]], width: int) -> list[float]:
    """One value per column, over equal ranges of steps; a range without a point repeats the
    previous value."""
    first, span = points[0][0], points[-1][0] - points[0][0] + 1
    groups: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        groups[(step - first) * width // span].append(value)
    out: list[float] = []
    for group in groups:
        out.append(sum(group) / len(group) if group else out[-1])
    return out
