"""Parser of JSON with // comments, for option files; records the line of every key.

Error messages never quote the file, since it may contain a secret.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from training.core.jsonl import Record
from training.core.messages import msg
from training.core.redact import SECRET_NAME, masked

MAX_DEPTH = 50
MAX_DIGITS = 18  # every whole number in a configuration has fewer
Keys = tuple[str, ...]  # from the top down to one key

_GAP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r'(?:(?!//)[^\s,:{}\[\]"])+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None}
_CLOSING = {"{": "}", "[": "]"}


class JsoncError(Exception):
    """A syntax error. Line and column count from 1."""

    def __init__(self, line: int, column: int, message: str) -> None:
        self.line, self.column, self.message = line, column, message
        super().__init__(f"{line}:{column}: {message}")


@dataclass
class Document:
    """A parsed file. The last one of duplicate keys counts."""

    value: Any = None
    lines: dict[Keys, int] = field(default_factory=dict)  # of every key outside lists
    # duplicate keys with the lines of both
    twice: list[tuple[Keys, int, int]] = field(default_factory=list)


def parse(text: str) -> Document:
    """Raises JsoncError."""
    reader = _Reader(text)
    reader.document.value = reader.whole()
    return reader.document


def without_comments(text: str) -> str:
    """Replace comments by spaces, so that positions are kept; the text may be invalid JSON."""
    pattern = re.compile(rf"({_STRING.pattern})|//[^\n]*")
    return pattern.sub(lambda found: found[0] if found[1] else " " * len(found[0]), text)


def relaxed(text: str) -> str:
    """The same, also for trailing commas: JSON with comments as accepted by editors."""
    pattern = re.compile(rf"({_STRING.pattern})|//[^\n]*|,(?={_GAP.pattern}[}}\]])")
    return pattern.sub(lambda found: found[0] if found[1] else " " * len(found[0]), text)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.document = text, 0, Document()
        self.ends = [found.start() for found in re.finditer("\n", text)]

    def line(self, at: int) -> int:
        return bisect.bisect_left(self.ends, at) + 1

    def wrong(self, message: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line = self.line(at)
        raise JsoncError(line, at - (self.ends[line - 2] if line > 1 else -1), message)

    def next(self) -> str:
        """The character after blanks and comments; '' at the end."""
        found = _GAP.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def whole(self) -> Any:
        if not self.next():
            self.wrong(msg("config.jsonc.empty"))
        value = self.one((), 0)
        if self.next():
            self.wrong(msg("config.jsonc.text_after_end"))
        return value

    def one(self, keys: Keys | None, depth: int) -> Any:
        """The value that begins here. `keys`: its path; None inside a list."""
        char = self.next()
        if char in ("{", "["):
            if depth >= MAX_DEPTH:
                self.wrong(msg("config.jsonc.too_deep", MAX_DEPTH=MAX_DEPTH))
            return self.members(keys, depth + 1) if char == "{" else self.items(depth + 1)
        return self.string() if char == '"' else self.scalar()

    def members(self, keys: Keys | None, depth: int) -> Record:
        out: Record = {}
        first: dict[str, int] = {}
        for _ in self.elements("{"):
            start = self.at
            if self.text[start : start + 1] != '"':
                self.wrong(msg("config.jsonc.no_key"))
            key, line = self.string(), self.line(start)
            if self.next() != ":":
                self.wrong(msg("config.jsonc.no_colon"))
            self.at += 1
            inside = None if keys is None else (*keys, key)
            if key in first:
                self.document.twice.append((inside or (key,), first[key], line))
            first.setdefault(key, line)
            if inside is not None:
                self.document.lines[inside] = line
            out[key] = self.one(inside, depth)
        return out

    def items(self, depth: int) -> list[Any]:
        return [self.one(None, depth) for _ in self.elements("[")]

    def elements(self, opening: str) -> Any:
        """Yield at the beginning of each element; end after the closing bracket."""
        start, closing = self.at, _CLOSING[opening]
        self.at += 1
        if self.next() == closing:
            self.at += 1
            return
        while True:
            self.begins(start, closing)
            yield
            char = self.next()
            if char not in (",", closing):
                self.ended(start, closing)
                self.wrong(msg("config.jsonc.no_comma", closing=closing))
            self.at += 1
            if char == closing:
                return

    def begins(self, start: int, closing: str) -> None:
        """Require an element here, not the end or a second comma."""
        char = self.next()
        self.ended(start, closing)
        if char in (",", *_CLOSING.values()):
            self.wrong(msg("config.jsonc.extra_comma"))

    def ended(self, start: int, closing: str) -> None:
        if self.at >= len(self.text):
            self.wrong(
                msg(
                    "config.jsonc.no_closing",
                    closing=closing,
                    opening=self.text[start],
                    line=self.line(start),
                )
            )

    def string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:
            self.wrong(msg("config.jsonc.unterminated"))
        try:
            value = json.loads(found[0])
            value.encode()
        except UnicodeEncodeError:
            self.wrong(msg("config.jsonc.surrogate"))
        except json.JSONDecodeError as error:
            self.wrong(msg("config.jsonc.escape"), self.at + error.pos)
        self.at = found.end()
        return str(value)

    def scalar(self) -> Any:
        found = _WORD.match(self.text, self.at)
        word = found[0] if found else ""
        number = _NUMBER.fullmatch(word)
        if word not in _CONSTANTS and number is None:
            self.wrong(_hint(word))
        self.at += len(word)
        if number is None:
            return _CONSTANTS[word]
        if number[1] is None and number[2] is None:
            return (
                int(word)
                if len(word) <= MAX_DIGITS
                else self.wrong(msg("config.loader.number_too_large"), self.at - len(word))
            )
        value = float(word)
        return (
            value
            if abs(value) != float("inf")
            else self.wrong(msg("config.loader.number_too_large"), self.at - len(word))
        )


def _hint(word: str) -> str:
    small = word.lower().lstrip("+-")
    if not word:
        return msg("config.jsonc.no_value")
    if small in ("true", "false", "null", "none"):
        return msg("config.jsonc.lower_case")
    if small in ("nan", "inf", "infinity"):
        return msg("config.jsonc.nan")
    if word.startswith(("#", "/*")):
        return msg("config.jsonc.comments")
    if small[:1].isdigit() or small.startswith("."):
        return msg("config.jsonc.number")
    return msg("config.jsonc.quotes")


def kind(value: Any) -> str:
    names = {
        bool: msg("config.allowed.bool"),
        int: msg("config.allowed.float"),
        float: msg("config.allowed.float"),
        str: msg("config.jsonc.kind_text"),
        list: msg("config.jsonc.kind_list"),
        dict: msg("config.jsonc.kind_object"),
    }
    return names.get(type(value), "null")


def short(value: Any) -> str:
    """A value for a message, as in the file and masked; only the kind of objects and of lists that
    contain some."""
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value)
    ):
        return kind(value)
    text = json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    # A path is not a secret, however long it is.
    text = text if "/" in text and not re.search(r"\s", text) else masked(text)
    return text if len(text) <= 160 else f"{text[:157]}…"


def spelled(keys: Keys) -> str:
    text = ".".join(key if key.isprintable() and len(key) <= 80 else repr(key[:80]) for key in keys)
    return text if SECRET_NAME.search(keys[-1]) else masked(text)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
