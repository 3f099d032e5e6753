"""Search for many patterns in one pass. RE2 takes linear time for any text; without it, Python's
own `re` finds the same, slowly."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

try:
    import re2

    re2.Filter, re2.Options  # noqa: B018 – other packages have a module of this name, without these
except (ImportError, AttributeError):
    re2 = None

SHORTEST = 4  # characters of a useful literal
LONGEST_LINE = 8192  # bytes, for `re`, which may take quadratic time
LINE_END = re.compile(rb"[\r\n]")


@functools.cache
def compiled(pattern: str) -> Any:
    """For bytes: a log may have any encoding, or several. Cached; most are never used."""
    if re2 is None:
        return re.compile(pattern.encode())
    return re2.compile(pattern.encode(), _options(latin=pattern.isascii()))


def groups(found: Any) -> dict[str, str]:
    """The values that a match has captured; RE2 has names in bytes, too."""
    return {
        _text(name): _text(value) for name, value in found.groupdict().items() if value is not None
    }


def lines(data: bytes) -> list[bytes]:
    """Those that a pattern is searched in."""
    longest = LONGEST_LINE if re2 is None else None
    return [line[:longest] for line in LINE_END.split(data)]


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def _options(latin: bool) -> Any:
    chosen = re2.Options()
    chosen.encoding = re2.Options.Encoding.LATIN1 if latin else re2.Options.Encoding.UTF8
    chosen.never_nl = True
    chosen.log_errors = False
    return chosen


def finder(patterns: Sequence[tuple[str, str]]) -> Fast | Slow:
    """`patterns`: (key, pattern), each searched within one line."""
    return Slow(patterns) if re2 is None else Fast(patterns)


class Fast:
    """First the literals of all patterns in one automaton (RE2's filter), then only the patterns
    whose literals occur."""

    def __init__(self, patterns: Sequence[tuple[str, str]]) -> None:
        self._literals = re2.Filter()
        self._patterns = []
        for key, pattern in patterns:
            # a launcher's prefix may precede it; the line is matched again later
            lines = "(?m)" + pattern.removeprefix("^")
            self._literals.Add(lines.encode(), _options(latin=False))
            self._patterns.append((key, lines))
        self._literals.Compile()

    def candidates(self, data: bytes) -> list[tuple[str, str]]:
        """(key, pattern) that may match."""
        return [self._patterns[index] for index in self._literals.Match(data, True) or ()]

    def found(self, data: bytes) -> Iterator[tuple[str, int]]:
        """(key, position), unordered."""
        for key, pattern in self.candidates(data):
            for match in compiled(pattern).finditer(data):
                yield key, match.start()


class Slow:
    def __init__(self, patterns: Sequence[tuple[str, str]]) -> None:
        self._patterns = [
            (key, pattern.removeprefix("^"), literals(pattern)) for key, pattern in patterns
        ]

    def candidates(self, data: bytes) -> list[tuple[str, str]]:
        low = data.lower()
        return [
            (key, pattern)
            for key, pattern, needed in self._patterns
            if any(literal in low for literal in needed)
        ]

    def found(self, data: bytes) -> Iterator[tuple[str, int]]:
        candidates = self.candidates(data)
        if not candidates:
            return
        start = 0
        for line in LINE_END.split(data):
            low = line[:LONGEST_LINE].lower()
            for key, pattern, needed in self._patterns:
                if any(literal in low for literal in needed) and (
                    match := compiled(pattern).search(line[:LONGEST_LINE])
                ):
                    yield key, start + match.start()
            start += len(line) + 1


def literals(pattern: str) -> tuple[bytes, ...]:
    """Lower-case literals of which every match contains one; (b"",) if unknown."""
    # the name before Python 3.11
    parser = re._parser if hasattr(re, "_parser") else __import__("sre_parse")
    found = _needed(list(parser.parse(pattern)))
    return tuple(sorted(found)) if found else (b"",)


def _needed(items: list[Any]) -> set[bytes]:
    """The best literals that every match contains: one run of characters, or one of each
    alternative."""
    best: set[bytes] = set()
    run = ""
    for kind, value in [*items, (None, None)]:
        name = str(kind).lower()
        if name == "literal":
            run += chr(value)
            continue
        here = {run.lower().encode()} if len(run) >= SHORTEST else set()
        best, run = _better(best, here), ""
        if name == "subpattern":
            best = _better(best, _needed(list(value[3])))
        elif name == "branch":
            parts = [_needed(list(part)) for part in value[1]]
            best = _better(best, set().union(*parts) if all(parts) else set())
        elif name in ("max_repeat", "min_repeat") and value[0] >= 1:
            best = _better(best, _needed(list(value[2])))
    return best


def _better(one: set[bytes], other: set[bytes]) -> set[bytes]:
    """The rarer set: the one whose shortest text is longer."""
    return max(one, other, key=lambda texts: min(map(len, texts), default=0))
