"""JSON that every parser accepts: it has no NaN and no infinity. In files they are the strings
"NaN", "Infinity" and "-Infinity", which readers turn into numbers; commands print null."""

from __future__ import annotations

import json
import math
from typing import Any

NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MARKS = ('NaN"', 'Infinity"')
BYTES = tuple(mark.encode() for mark in MARKS)
# Keys of text in the records of a run; all other keys, also a task's own, may have figures.
TEXTS = frozenset({
    "by", "cause", "checkpoint", "cluster", "code", "event", "fault", "folder", "job", "kind",
    "launch", "path", "phase", "pieces", "sample", "status", "text", "weights", "where",
})  # fmt: skip


def dumps(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """For a file."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        return json.dumps(_mapped(value, _name), indent=indent, ensure_ascii=ensure_ascii)


def as_stored(value: Any) -> Any:
    """As a file returns it: with names for NaN and infinity, lists for tuples."""
    return json.loads(dumps(value))


def as_given(value: Any) -> Any:
    """The inverse of as_stored(), but a text that spells NaN becomes a number."""
    if isinstance(value, dict):
        return {key: as_given(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_given(one) for one in value]
    return NAMES.get(value, value) if isinstance(value, str) else value


def answer(value: Any, *, indent: int | None = 1, ensure_ascii: bool = True) -> str:
    """For --json, in ASCII since the output may have any encoding, and for --notify."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def loads(line: str | bytes) -> Any:
    """A record, or a list of records; early ones have bare NaN. Raises ValueError,
    RecursionError."""
    found = json.loads(line)
    marks: Any = MARKS if isinstance(line, str) else BYTES
    if not any(mark in line for mark in marks):
        return found
    return [numbers(one) for one in found] if isinstance(found, list) else numbers(found)


def numbers(value: Any) -> Any:
    """With the numbers that dumps() has named. Texts stay, and so do lists: arguments of a command
    are lists."""
    if not isinstance(value, dict):
        return value
    return {key: one if key in TEXTS else _number(one) for key, one in value.items()}


def finite(value: Any) -> Any:
    """With null for NaN and infinity."""
    return _mapped(value, lambda number: None)


def _number(value: Any) -> Any:
    return NAMES.get(value, value) if isinstance(value, str) else numbers(value)


def _name(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _mapped(value: Any, of: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(one, of) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(one, of) for one in value]
    return of(value) if isinstance(value, float) and not math.isfinite(value) else value
