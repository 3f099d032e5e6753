"""The first look at a log: where, in gigabytes, anything stands that is worth reading. RE2 finds the literal parts of all patterns in
one pass and searches in linear time whatever a log holds, so that no text can make it run away."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field

import re2

from training.diagnose import catalogue
from training.diagnose.source import Chunk, Source

FIRST, LAST = 32, 256  # places kept of each pattern: when it began, and the end of the log
FAR = 4096  # bytes into its line: the place is then near the match, not at the start of the line
TRACEBACK = "traceback"
# Not what failed, but how logs are built: read by training.diagnose.story.
STRUCTURE = {
    TRACEBACK: r"Traceback \(most recent call last",
    "report": r"(?:Root Cause|Other Failures|first observed failure)",
    "report_rank": r"rank {1,10}: \d+ \(local_rank: \d+\)",
    "ended": r"(?:[Ff]ailed|exit(?:ed|s)?|died|terminated) (?:\(exitcode: |with (?:a )?(?:non-zero )?(?:exit|return) (?:code|status))",
    "exit_line": r"(?:exitcode|exit_code|ExitCode|returncode|return code) {0,8}[:=] {0,3}-?\d+",
    "aborted": r"terminate called|core dumped|Fatal Python error",
    "enqueued": r"[Ll]ast enqueued (?:NCCL )?work: ",
    "enqueued_old": r"last enqueued: \d+",
    "spawned": r"-- Process \d+ terminated",
    "card": r"  Cause      [a-z_]+: ",
}


@dataclass(frozen=True)
class Place:
    key: str  # `<id of a signature>` or a name of STRUCTURE
    line: int
    offset: int  # in the file, of the segment


@dataclass
class Places:
    """All that was found of one log, in its order."""

    found: list[Place] = field(default_factory=list)
    lines: int = 0  # of the log
    size: int = 0  # in bytes


class _Kept:
    def __init__(self) -> None:
        self.first: list[Place] = []
        self.last: deque[Place] = deque(maxlen=LAST)

    def add(self, place: Place) -> None:
        if len(self.first) < FIRST:
            self.first.append(place)
        else:
            self.last.append(place)


@functools.cache
def compiled(pattern: str) -> re2._Regexp:
    """For bytes: a log may be of any encoding, or of several. Most are never asked for."""
    return re2.compile(pattern.encode(), _options(latin=pattern.isascii()))


def _options(latin: bool) -> re2.Options:
    chosen = re2.Options()
    chosen.encoding = re2.Options.Encoding.LATIN1 if latin else re2.Options.Encoding.UTF8
    chosen.never_nl = True
    chosen.log_errors = False
    return chosen


@functools.lru_cache(maxsize=1)
def _patterns() -> tuple[re2.Filter, list[tuple[str, str]]]:
    """(what finds the candidates in a text, (key, pattern) of each)."""
    literals, all_of_them = re2.Filter(), []
    for key, pattern in (*((s.id, p) for s in catalogue.signatures() for p in s.patterns), *STRUCTURE.items()):
        unanchored = "(?m)" + pattern.removeprefix("^")  # a launcher's prefix may stand before; read again in its line
        literals.Add(unanchored.encode(), _options(latin=False))
        all_of_them.append((key, unanchored))
    literals.Compile()
    return literals, all_of_them


def recognised(text: str) -> list[catalogue.Signature]:
    """What the catalogue knows of a short text, an exception's message for example; what decides comes first."""
    literals, patterns = _patterns()
    known = {s.id: s for s in catalogue.signatures()}
    data = text.encode("utf-8", "replace")
    candidates = [patterns[index] for index in literals.Match(data, True) or ()]
    found = dict.fromkeys(key for key, pattern in candidates if key in known and compiled(pattern).search(data))
    return sorted((known[key] for key in found), key=lambda s: catalogue.ROLES.index(s.role))


def scan(source: Source) -> Places:
    """Every place of a log in constant memory: of each pattern the first and the last ones."""
    literals, patterns = _patterns()
    kept: dict[str, _Kept] = {}
    places = Places(size=source.size())
    newlines = 0
    for chunk in source.chunks():
        for index in literals.Match(chunk.data, True) or ():
            key, pattern = patterns[index]
            mine = kept.setdefault(key, _Kept())
            for match in compiled(pattern).finditer(chunk.data):
                mine.add(_place(key, chunk, match.start()))
        newlines += chunk.raw.count(b"\n")
    places.lines = newlines + 1
    unique = {place for k in kept.values() for place in (*k.first, *k.last)}
    places.found = sorted(unique, key=lambda p: (p.offset, p.key))
    return places


def _place(key: str, chunk: Chunk, start: int) -> Place:
    line, offset = chunk.place(start)
    if len(chunk.raw) == len(chunk.data) and chunk.offset + start - offset > FAR:
        offset = chunk.offset + start - FAR // 4
    return Place(key, line, offset)
