"""JSON in which // begins a comment, with the line of every key: what option files are written in.

The message of an error never holds text of the file: it may hold a key that nobody else should see.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from training.core.jsonl import Record
from training.core.redact import SECRET_NAME, masked

MAX_DEPTH = 50
MAX_DIGITS = 18  # every whole number of a configuration has less
Keys = tuple[str, ...]  # from the top down to one key

_GAP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r'(?:(?!//)[^\s,:{}\[\]"])+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None}
_CLOSING = {"{": "}", "[": "]"}


class JsoncError(Exception):
    """What is no JSON, and where: line and column count from 1."""

    def __init__(self, line: int, column: int, message: str) -> None:
        self.line, self.column, self.message = line, column, message
        super().__init__(f"{line}:{column}: {message}")


@dataclass
class Document:
    """What a text holds. Where a key is given twice, the last one counts."""

    value: Any = None
    lines: dict[Keys, int] = field(default_factory=dict)  # of every key that no list is around
    # with the lines of the first and the second
    twice: list[tuple[Keys, int, int]] = field(default_factory=list)


def parse(text: str) -> Document:
    """Raises JsoncError."""
    reader = _Reader(text)
    reader.document.value = reader.whole()
    return reader.document


def without_comments(text: str) -> str:
    """Spaces for comments, so that every character stays where it is; also of a text that is no
    JSON."""
    pattern = re.compile(rf"({_STRING.pattern})|//[^\n]*")
    return pattern.sub(lambda found: found[0] if found[1] else " " * len(found[0]), text)


def relaxed(text: str) -> str:
    """The same, and for a comma before a closing bracket too: what editors accept as JSON with
    comments."""
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
            self.wrong("nothing is in it")
        value = self.one((), 0)
        if self.next():
            self.wrong("something stands after the end")
        return value

    def one(self, keys: Keys | None, depth: int) -> Any:
        """The value that begins here. `keys`: where it stands; None inside a list."""
        char = self.next()
        if char in ("{", "["):
            if depth >= MAX_DEPTH:
                self.wrong(f"nested deeper than {MAX_DEPTH}")
            return self.members(keys, depth + 1) if char == "{" else self.items(depth + 1)
        return self.string() if char == '"' else self.scalar()

    def members(self, keys: Keys | None, depth: int) -> Record:
        out: Record = {}
        first: dict[str, int] = {}
        for _ in self.elements("{"):
            start = self.at
            if self.text[start : start + 1] != '"':
                self.wrong("a key in double quotes is expected")
            key, line = self.string(), self.line(start)
            if self.next() != ":":
                self.wrong("a colon is missing after the key")
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
        """Comes back once for each element, standing at its beginning, and goes behind the closing
        bracket at the end."""
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
                self.wrong(f"a comma or {closing} is missing before this")
            self.at += 1
            if char == closing:
                return

    def begins(self, start: int, closing: str) -> None:
        """An element, and not the end or a second comma."""
        char = self.next()
        self.ended(start, closing)
        if char in (",", *_CLOSING.values()):
            self.wrong("a comma too many, or something missing, before this")

    def ended(self, start: int, closing: str) -> None:
        if self.at >= len(self.text):
            self.wrong(
                f"the {self.text[start]} of line {self.line(start)} is never closed: {closing} is "
                f"missing"
            )

    def string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:
            self.wrong(
                "this text does not end: a double quote is missing, or a tab or another control "
                "character is in it"
            )
        try:
            value = json.loads(found[0])
            value.encode()
        except UnicodeEncodeError:
            self.wrong("half a character (a lone surrogate) is in this text")
        except json.JSONDecodeError as error:
            self.wrong("a backslash begins something that JSON does not know", self.at + error.pos)
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
                else self.wrong("the number is too large", self.at - len(word))
            )
        value = float(word)
        return (
            value
            if abs(value) != float("inf")
            else self.wrong("the number is too large", self.at - len(word))
        )


def _hint(word: str) -> str:
    small = word.lower().lstrip("+-")
    if not word:
        return "a value is missing"
    if small in ("true", "false", "null", "none"):
        return "true, false and null are written in small letters (null, not None)"
    if small in ("nan", "inf", "infinity"):
        return "NaN and Infinity are no numbers of JSON"
    if word.startswith(("#", "/*")):
        return "comments begin with //"
    if small[:1].isdigit() or small.startswith("."):
        return "not a number as JSON writes them (12, 0.5, 1e-4)"
    return "text stands in double quotes"


def kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def short(value: Any) -> str:
    """For a message, as the file has it. Of what holds more only its kind: nobody knows what is in
    it."""
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value)
    ):
        return kind(value)
    text = json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    # a path is no key, though it may be long
    text = text if "/" in text and not re.search(r"\s", text) else masked(text)
    return text if len(text) <= 160 else f"{text[:157]}…"


def spelled(keys: Keys) -> str:
    text = ".".join(key if key.isprintable() and len(key) <= 80 else repr(key[:80]) for key in keys)
    return text if SECRET_NAME.search(keys[-1]) else masked(text)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
