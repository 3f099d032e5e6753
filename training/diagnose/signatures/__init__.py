"""What is known of failures: data, read from the .json files beside this one. A cause is added by
an entry here and a log in tests/fixtures/logs; tests/unit/test_diagnose_catalogue.py refuses an
entry without one.

causes.json   one entry a cause: its name for people, general advice
kinds.json    advice for what only a supervisor sees: a machine that is silent, ranks that do
              different things
*.json        one entry a text that programs print: which cause it speaks of, and in which role
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from training.core.jsonl import Record

FOLDER = Path(__file__).parent
CAUSES, KINDS = FOLDER / "causes.json", FOLDER / "kinds.json"
LANGUAGES = ("en", "zh")
NONE, UNKNOWN = "none", "unknown"
# what is known is only that it raised, or how it left
RAISED, EXIT_STATUS = (
    "exception",
    "exit_status",
)

# What a text says of its speaker. The first ones decide before the later ones.
ROOT = "root"  # this broke
WEAK = "weak"  # this broke, if nothing else says why
VICTIM = "victim"  # waited in vain for somebody
CASCADE = "cascade"  # lost somebody, or reports that somebody failed
EVIDENCE = "evidence"  # frightening, yet no cause
ROLES = (ROOT, WEAK, VICTIM, CASCADE, EVIDENCE)


@dataclass(frozen=True)
class LocalizedText:
    """A sentence, or several, in every language of LANGUAGES; `{name}` stands for a value."""

    en: tuple[str, ...] = ()
    zh: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Record | None) -> LocalizedText:
        return cls(
            **{
                name: (text,) if isinstance(text, str) else tuple(text)
                for name, text in (raw or {}).items()
            }
        )

    def in_language(self, language: str) -> tuple[str, ...]:
        return (self.zh if language == "zh" else self.en) or self.en


@dataclass(frozen=True)
class Signature:
    """A text that programs print. `patterns`: RE2, searched in one line without its rank's prefix;
    `versions` and `source`: who prints it, and where that was read."""

    id: str
    cause: str
    role: str
    patterns: tuple[str, ...]
    samples: tuple[str, ...]
    versions: str
    source: str
    says: LocalizedText
    advice: LocalizedText


@dataclass(frozen=True)
class Cause:
    """`ours`: advice for a run of ours, with values of its plan; `advice`: for anybody's. `same`:
    patterns of topics: a text's own sentence is left out beside one of `ours` with the same
    topic."""

    id: str
    title: LocalizedText
    advice: LocalizedText
    ours: LocalizedText
    source: str
    same: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def signatures() -> tuple[Signature, ...]:
    """All of them, in a fixed order. Raises KeyError, TypeError or ValueError for an entry of the
    wrong form."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        if path not in (CAUSES, KINDS):
            found += [_signature(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    return tuple(found)


@functools.lru_cache(maxsize=1)
def causes() -> dict[str, Cause]:
    entries = json.loads(CAUSES.read_text(encoding="utf-8"))
    return {
        e["id"]: Cause(
            e["id"],
            LocalizedText.of(e["title"]),
            LocalizedText.of(e.get("advice")),
            LocalizedText.of(e.get("ours")),
            e["source"],
            tuple(e.get("same", ())),
        )
        for e in entries
    }


@functools.lru_cache(maxsize=1)
def kinds() -> dict[str, LocalizedText]:
    return {
        entry["id"]: LocalizedText.of(entry["advice"])
        for entry in json.loads(KINDS.read_text(encoding="utf-8"))
    }


def _signature(entry: Record) -> Signature:
    return Signature(
        id=entry["id"],
        cause=entry["cause"],
        role=entry["role"],
        patterns=tuple(entry["patterns"]),
        samples=tuple(entry["samples"]),
        versions=entry["versions"],
        source=entry["source"],
        says=LocalizedText.of(entry["says"]),
        advice=LocalizedText.of(entry.get("advice")),
    )
