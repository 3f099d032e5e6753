"""Words that make English hard to read, and what to write instead.

`python -m tests.language [PATH …]` lists where they occur; tests/unit/test_language.py keeps the
list empty. It reads prose alone: comments and strings of Python files, names of tests, and the
whole of all other files. A line that quotes foreign text ends with `# language: quoted`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUOTED = "language: quoted"
# What others have written, data, and the list below itself.
FOREIGN = (
    "tests/fixtures/",
    "tests/language.py",
    "tests/unit/test_language.py",
    "training/diagnose/signatures/",
    "training/monitor/report/uplot",
    "README.zh-CN.md",
    "LICENSE",
    "requirements.lock",
    "options/",
)
PROSE = (".md", ".py", ".sh", ".bats", ".json", ".yml", ".toml", "")


@dataclass(frozen=True)
class Pattern:
    """`name` for a reader, `regex` without regard to case, `instead`: what to write."""

    name: str
    regex: str
    instead: str


PATTERNS = (
    Pattern(
        "speech verb",
        r"\b(say|says|said|saying|tell|tells|told|telling)\b(?!\":)",
        "reports, logs, warns, prints, exports, names; software does not speak",
    ),
    Pattern(
        "negated noun",
        r"(?<!there )\b(is|are|was|were|be) no (?!(longer|more|less|fewer|later|earlier)\b)",
        "'is not a …', 'unknown key', 'invalid …'",
    ),
    Pattern("can not", r"\bcan not\b", "cannot"),
    Pattern(
        "person",
        r"\b(whoever|nobody|somebody|anybody|strangers?|last words?|gives? no sign|given no sign"
        r"|sign of life|whom)\b",
        "the rank, the process, the user; 'no heartbeat'",
    ),
    Pattern(
        "time or quantity",
        r"\bsince (\d|\{[^}]*\} (s|min|h)\b)|\bso long (?!as\b)|\bevery so often\b|\bthis long\b",
        "'for 12 s', 'for that long', 'every N steps'",
    ),
    Pattern(
        "stands, lies, goes on",
        r"\b(stands?|stood|lies|anew|go on|goes on|went on|going on)\b(?!-)",
        "is, is at, contains, continues, resumes, recomputed",
    ),
    Pattern(
        "ours",
        r"\b(ours|of ours|somebody else's|somebody's)\b",
        "Duet's; the user's script; another user's process",
    ),
    Pattern(
        "fronted genitive",
        r"(?:^|[.:!?\"'(#] ?)(?-i:Of) (a|an|the|all|each|every|its|their|our) (?=[a-z])",
        "subject first: 'the curves of a script are …'",
    ),
    Pattern("word", r"\b(no|a|other|better) word (to|that|from|of|for)\b", "message"),
)


@dataclass(frozen=True)
class Occurrence:
    """`text` in the line `whole`; `line` counts from 1."""

    path: str
    line: int
    whole: str
    text: str
    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r} in: {self.whole}"


def files(paths: list[str]) -> list[str]:
    """Tracked files that hold prose of ours, as relative paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        name
        for name in listed
        if Path(name).suffix in PROSE
        and not name.startswith(FOREIGN)
        and (ROOT / name).is_file()
        and not Path(name).name.startswith(".")
    ]


def _prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of whatever a person reads."""
    if not name.endswith(".py"):
        yield from enumerate(text.splitlines(), 1)
        return
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
        elif kind == "NAME" and before == "def" and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")
        if kind not in ("NL", "NEWLINE", "INDENT", "DEDENT"):
            before = token.string


def occurrences(name: str, text: str) -> list[Occurrence]:
    lines = text.splitlines()
    return [
        Occurrence(name, number, lines[number - 1].strip(), match.group().strip(), pattern)
        for number, line in _prose(name, text)
        if QUOTED not in lines[number - 1]
        for pattern in PATTERNS
        for match in re.finditer(pattern.regex, line, re.IGNORECASE)
    ]


def main() -> int:
    found = [
        each
        for name in files(sys.argv[1:])
        for each in occurrences(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n")
    counts = {p.name: sum(each.pattern is p for each in found) for p in PATTERNS}
    print(", ".join(f"{name} {count}" for name, count in counts.items()), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
