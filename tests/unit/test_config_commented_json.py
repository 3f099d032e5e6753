"""JSON with comments: the same values as json.loads, the line of every key, and an error for any
invalid text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from training.config.jsonc import (
    MAX_DEPTH,
    JsoncError,
    Keys,
    parse,
    short,
    spelled,
    without_comments,
)

KAIR = sorted((Path(__file__).resolve().parents[1] / "fixtures/kair/options").glob("*/*.json"))
WORDS = [
    "a",
    "x//y",
    "https://host/p",
    'not "no"',
    "back\\slash",
    "// all",
    "é 漢字",
    "",
    "{",
    "],",
    ":",
    "tab\there",
    "true",
    "\u2028",
]


class Writer:
    """Writer of JSON with blanks, line breaks and comments wherever they are allowed; records the
    line of every key."""

    def __init__(self, random: random.Random) -> None:
        self.random, self.text, self.lines = random, "", dict[Keys, int]()

    def gap(self) -> None:
        for _ in range(self.random.randrange(3)):
            self.text += self.random.choice(
                [" ", "\t", "\n", "\r\n", "  \n", '// "key": { [ , "\n', "//\n", "//// // x\n"]
            )

    def value(self, value: Any, keys: Keys | None) -> None:
        self.gap()
        if isinstance(value, dict):
            self.members(
                "{",
                "}",
                [
                    (keys and (*keys, k) if keys is None else (*keys, k), k, v)
                    for k, v in value.items()
                ],
            )
        elif isinstance(value, list):
            self.members("[", "]", [(None, None, v) for v in value])
        else:
            self.text += json.dumps(value, ensure_ascii=self.random.random() < 0.5)
        self.gap()

    def members(
        self, opening: str, closing: str, members: list[tuple[Keys | None, str | None, Any]]
    ) -> None:
        self.text += opening
        self.gap()
        for i, (keys, name, value) in enumerate(members):
            self.text += "," if i else ""
            self.gap()
            if name is not None:
                if keys is not None:
                    self.lines[keys] = self.text.count("\n") + 1
                self.text += json.dumps(name)
                self.gap()
                self.text += ":"
            self.value(value, keys)
        self.text += closing


def made(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(8 if depth < 4 else 6)
    if kind == 7 or not depth:
        return {
            random.choice(WORDS) + str(i): made(random, depth + 1)
            for i in range(random.randrange(5))
        }
    if kind == 6:
        return [made(random, depth + 1) for _ in range(random.randrange(4))]
    return [
        True,
        None,
        random.choice(WORDS),
        random.randrange(-(10**12), 10**12),
        random.uniform(-1, 1) * 1e-7,
        0.5,
    ][kind]


@each("seed", range(200))
def test_values_and_lines_of_all_keys_are_parsed(seed: int) -> None:
    value = made(random.Random(seed))
    writer = Writer(random.Random(seed))
    writer.value(value, ())
    document = parse(writer.text)
    assert document.value == value == json.loads(without_comments(writer.text))
    assert document.lines == writer.lines
    assert document.twice == []
    assert len(without_comments(writer.text)) == len(writer.text)


@each("seed", range(200))
def test_invalid_json_is_rejected(seed: int) -> None:
    """Truncated, or with a character added or removed: rejected exactly if json.loads rejects
    it."""
    source = random.Random(seed)
    text = json.dumps(made(source), indent=source.choice([None, 1]))
    for _ in range(20):
        at = source.randrange(len(text))
        damaged = source.choice(
            [
                text[:at],
                text[:at] + source.choice('{}[]",:\\x0-.e\n') + text[at:],
                text[:at] + text[at + 1 :],
            ]
        )
        try:
            expected = json.loads(
                without_comments(damaged), parse_constant=lambda _: pytest.fail("not made here")
            )
        except ValueError:
            with pytest.raises(JsoncError) as caught:
                parse(damaged)
            assert 1 <= caught.value.line <= damaged.count("\n") + 1
            assert 1 <= caught.value.column <= len(damaged.split("\n")[caught.value.line - 1]) + 1
        else:
            try:
                assert parse(damaged).value == expected
            except JsoncError as wrong:  # inserted digits
                assert wrong.message == "the number is too large"


@each("path", KAIR, ids=lambda p: p.stem)
def test_files_of_kair_parse_as_in_kair(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = parse(text)
    assert document.value == json.loads(
        "".join(line.split("//")[0] + "\n" for line in text.split("\n"))
    )
    for keys, line in document.lines.items():
        assert f'"{keys[-1]}"' in text.split("\n")[line - 1].split("//")[0]
    assert len(document.lines) > 80


def test_slashes_within_quotes_are_kept() -> None:
    text = '{"url": "https://a//b", // "c"\n "path": "//x/y" //, "no": 1\n, "q": "\\"//" }'
    assert parse(text).value == {"url": "https://a//b", "path": "//x/y", "q": '"//'}


@each(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "empty"),
        ("// only a comment", 1, 18, "empty"),
        ('{\n  "a": 1\n  "b": 2\n}', 3, 3, "comma or }"),
        ('{\n  "a": 1,\n}', 3, 1, "comma"),
        ('{"a": [1,,2]}', 1, 10, "comma"),
        ('{\n "a": {"b": 1\n', 3, 1, "} for the { in line 2"),
        ('{"a": [1, 2', 1, 12, "] for the [ in line 1"),
        ('{"a" 1}', 1, 6, "colon"),
        ("{a: 1}", 1, 2, "key in double quotes"),
        ('{"a": True}', 1, 7, "lower-case"),
        ('{"a": None}', 1, 7, "lower-case"),
        ('{"a": NaN}', 1, 7, "NaN"),
        ('{"a": -Infinity}', 1, 7, "NaN"),
        ('{"a": 1e999}', 1, 7, "too large"),
        ('{"a": ' + "9" * 5000 + "}", 1, 7, "too large"),
        ('{"a": 01}', 1, 7, "JSON number"),
        ('{"a": .5}', 1, 7, "JSON number"),
        ("{\"a\": 'x'}", 1, 7, "in double quotes"),
        ('{"a": x/y}', 1, 7, "in double quotes"),
        ('{"a": /* no */ 1}', 1, 7, "begin with //"),
        ('# no\n{"a": 1}', 1, 1, "begin with //"),
        ('{"a": }', 1, 7, "missing value"),
        ('{"a": "x\n"}', 1, 7, "unterminated"),
        ('{"a": "\\q"}', 1, 8, "escape sequence"),
        ('{"a": "\\ud800"}', 1, 7, "surrogate"),
        ('{"a": 1}}', 1, 9, "after the end"),
        ("[" * 100_000, 1, MAX_DEPTH + 1, f"nested deeper than {MAX_DEPTH}"),
        ('{"a":' * 100_000, 1, 5 * MAX_DEPTH + 1, f"nested deeper than {MAX_DEPTH}"),
    ],
)
def test_syntax_errors(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(JsoncError) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert message in caught.value.message


def test_duplicate_keys() -> None:
    document = parse('{"a": 1,\n "b": {"c": 1,\n "c": 2},\n "a": 3, "l": [{"x": 1,\n "x": 2}]}')
    assert document.value == {"a": 3, "b": {"c": 2}, "l": [{"x": 2}]}
    assert document.twice == [(("b", "c"), 2, 3), (("a",), 1, 4), (("x",), 4, 5)]


def test_a_large_file() -> None:
    text = (
        "{"
        + "".join(
            f'{"," if i else ""} "k{i}": {{"v": [{i}, "//"]}} // note {i}\n' for i in range(20_000)
        )
        + "}"
    )
    document = parse(text)
    assert document.lines[("k19999", "v")] == 20_000
    assert len(document.value) == 20_000


def test_values_for_messages() -> None:
    assert short("a") == '"a"'
    assert short(["x", 1, None, False]) == '["x", 1, null, false]'
    assert short("\x1b[31m\u202e") == '"\\u001b[31m\\u202e"'
    assert short({"wandb_api_key": "0" * 40}) == "an object"
    assert short([{"wandb_api_key": "0" * 40}]) == "a list"
    assert "0123" not in short("0123456789abcdef0123456789abcdef01234567")
    assert len(short("word " * 1000)) <= 160
    assert spelled(("a", "\x1b[31m")) == "a.'\\x1b[31m'"
    assert len(spelled(("k" * 10_000,))) < 100
