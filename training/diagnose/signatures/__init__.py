"""Catalogue of known failures: data in the .json files of this folder. A new cause needs an entry
here and a log in tests/fixtures/logs; tests/unit/test_diagnose_catalogue.py checks both.

causes.json   one entry per cause: title and general advice
kinds.json    advice for observations of the supervisor: a silent machine, diverging ranks
*.json        one entry per message that programs print: its cause and role
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from training.core import messages
from training.core.jsonl import Record

FOLDER = Path(__file__).parent
CAUSES, KINDS = FOLDER / "causes.json", FOLDER / "kinds.json"

# Role of a message for the rank that prints it; earlier roles take precedence.
ROOT = "root"  # the rank failed
WEAK = "weak"  # the rank failed, unless another message names the reason
VICTIM = "victim"  # the rank waited in vain for another one
CASCADE = "cascade"  # the rank lost another one, or reports its failure
EVIDENCE = "evidence"  # alarming, but not a cause
ROLES = (ROOT, WEAK, VICTIM, CASCADE, EVIDENCE)
# The memory of a rank that has ended looks like that of a failed GPU.
PEER_MEMORY = "gpu.hw.peer_memory"


@dataclass(frozen=True)
class LocalizedText:
    """Sentences in every language; `{name}` is replaced by a value."""

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

    def sentences(self) -> tuple[str, ...]:
        """In the selected language."""
        return (self.zh if messages.language() == "zh" else self.en) or self.en


@dataclass(frozen=True)
class Signature:
    """A message that programs print. `patterns`: RE2, searched in one line without its rank prefix;
    `versions` and `source`: of the program that prints it, and where that was read; `suspect`: a
    defective GPU may be the cause as well as the program."""

    id: str
    cause: str
    role: str
    patterns: tuple[str, ...]
    samples: tuple[str, ...]
    versions: str
    source: str
    says: LocalizedText
    advice: LocalizedText
    suspect: bool = False


@dataclass(frozen=True)
class Cause:
    """`ours`: advice for a Duet run, with values of its plan; `advice`: for any other. `same`:
    regexes of topics; a signature's sentence is omitted if one of `ours` has the same topic."""

    id: str
    title: LocalizedText
    advice: LocalizedText
    ours: LocalizedText
    source: str
    same: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def signatures() -> tuple[Signature, ...]:
    """All signatures, in a fixed order. Raises KeyError, TypeError or ValueError for a malformed
    entry."""
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
        suspect=entry.get("suspect", False),
    )
