"""First pass over a log of any size: the places that are worth reading."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.diagnose import card_rows, patterns, signatures
from training.diagnose.patterns import Fast, Slow, finder
from training.diagnose.source import Chunk, LogSource

FIRST, LAST = 32, 256  # places kept of each pattern: from its first ones, and from the log's end
FAR = 4096  # bytes into a line, beyond which a place is near the match, not at the line's start
TRACEBACK = "traceback"
# LSF adds a report to the output of each job, before or after it.
REPORT, OUTPUT_ABOVE, OUTPUT_BELOW = "job_report", "job_output_above", "job_output_below"
JOB_HEADER = "job_header"
JOB = (
    r"(?:SLURM_JOB_?ID|LSB_JOBID|PBS_JOBID"
    r"|(?:SLURM |Slurm |LSF |PBS )?[Jj][Oo][Bb][ _]?(?:ID|Id|id))"
    r" {0,20}[:=] {0,20}"
)
# Structure of logs, not failures: read by training.diagnose.log_analysis.
STRUCTURE = {
    TRACEBACK: r"Traceback \(most recent call last",
    "report": r"(?:Root Cause|Other Failures|first observed failure)",
    "report_rank": r"rank {1,10}: \d+ \(local_rank: \d+\)",
    "ended": r"(?:[Ff]ailed|exit(?:ed|s)?|died|terminated) (?:\(exitcode: |with (?:a )?(?:non-zero "
    r")?(?:exit|return) (?:code|status))",
    "exit_line": r"(?:exitcode|exit_code|ExitCode|returncode|return code) {0,8}[:=] {0,3}-?\d+",
    "aborted": r"terminate called|core dumped|Fatal Python error",
    "enqueued": r"[Ll]ast enqueued (?:NCCL )?work: ",
    "enqueued_old": r"last enqueued: \d+",
    "spawned": r"-- Process \d+ terminated",
    REPORT: r"Sender: LSF System <",
    OUTPUT_ABOVE: r"The output \(if any\) is above this job summary",
    OUTPUT_BELOW: r"The output \(if any\) follows:",
    JOB_HEADER: rf"{JOB}\d{{3,}}",
    "card": rf"  {card_rows.in_logs('diagnose.card.cause')}[a-z_]+: ",
}


@dataclass(frozen=True)
class LogSpan:
    key: str  # `<id of a signature>` or a name of STRUCTURE
    line: int
    offset: int  # in the file, of the segment


@dataclass
class Places:
    """Places found in one log, in file order."""

    found: list[LogSpan] = field(default_factory=list)
    lines: int = 0  # of the log
    size: int = 0  # in bytes
    dropped: frozenset[str] = frozenset()  # patterns with more places than are kept


class _Kept:
    def __init__(self) -> None:
        self.first: list[LogSpan] = []
        self.last: deque[LogSpan] = deque(maxlen=LAST)
        self.dropped = False

    def add(self, place: LogSpan) -> None:
        if len(self.first) < FIRST:
            self.first.append(place)
        else:
            self.dropped = self.dropped or len(self.last) == LAST
            self.last.append(place)


@functools.lru_cache(maxsize=1)
def known() -> Fast | Slow:
    return finder(
        [*((s.id, p) for s in signatures.signatures() for p in s.patterns), *STRUCTURE.items()]
    )


def recognised(text: str) -> list[signatures.Signature]:
    """Signatures that match a short text, such as an exception's message; the decisive role
    first."""
    return [signature for signature, _ in matched(text)]


def matched(text: str) -> list[tuple[signatures.Signature, dict[str, str]]]:
    """The same, with the values that each captures in the first line that it matches."""
    data = text.encode("utf-8", "replace")
    lines = patterns.lines(data)
    keys = {key for key, _ in known().candidates(data)}
    found = [
        (signature, patterns.groups(match))
        for signature in signatures.signatures()
        if signature.id in keys and (match := _first_match(signature, lines))
    ]
    return sorted(found, key=lambda one: signatures.ROLES.index(one[0].role))


def _first_match(signature: signatures.Signature, lines: Sequence[bytes]) -> Any:
    tried = (patterns.compiled(one).search(line) for one in signature.patterns for line in lines)
    return next((match for match in tried if match), None)


def named(text: str, of: Collection[str]) -> tuple[signatures.Signature | None, dict[str, str]]:
    """The signature of one of these causes in the text of an error, and the values that it
    captures."""
    found = (one for one in matched(text) if one[0].cause in of)
    return next(found, (None, {}))


def scan(source: LogSource) -> Places:
    """The first and last places of each pattern in a log, in constant memory."""
    kept: dict[str, _Kept] = {}
    places = Places(size=source.size())
    newlines = 0
    for chunk in source.chunks():
        for key, position in known().found(chunk.data):
            kept.setdefault(key, _Kept()).add(_place(key, chunk, position))
        newlines += chunk.raw.count(b"\n")
    places.lines = newlines + 1
    unique = {place for k in kept.values() for place in (*k.first, *k.last)}
    places.found = sorted(unique, key=lambda p: (p.offset, p.key))
    places.dropped = frozenset(key for key, k in kept.items() if k.dropped)
    return places


def _place(key: str, chunk: Chunk, start: int) -> LogSpan:
    line, offset = chunk.place(start)
    if len(chunk.raw) == len(chunk.data) and chunk.offset + start - offset > FAR:
        offset = chunk.offset + start - FAR // 4
    return LogSpan(key, line, offset)
