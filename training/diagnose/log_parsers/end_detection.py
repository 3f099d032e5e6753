"""Outcome of a training from the end of its log: finished, or failed with a reason. Cheap: it reads
only the end; `./duet diagnose` reads all of the log."""

from __future__ import annotations

import re
from collections.abc import Callable

from training.diagnose import card_rows, progress_marks, traceback
from training.diagnose import log_line as prefixes
from training.diagnose.log_line import LogLine
from training.diagnose.log_parsers import line_parser

FINISHED, FAILED = "finished", "failed"
SHOWN = 300  # characters of an exception
# Regular ends of frameworks, in addition to training.diagnose.progress_marks.
_FINISHED = re.compile(r"\bEnd of training\b|\bTraining completed?\b")
_DEATH = re.compile(
    r"ChildFailedError|^Killed$|^Terminated$|Segmentation fault|core dumped|Fatal Python "
    r"error|slurmstepd: error: .*(?:CANCELLED|oom.kill)"
    r"|oom-kill|srun: error: .*(?:Killed|Exited|Segmentation|task \d+:)|exitcode *: -?[1-9]|exited "
    r"with code [1-9]|^terminate called"
    r"|process exited, code=(?:exited, status=[1-9]|killed|dumped)",
    re.I,
)
# a card of Duet
_CARD = re.compile(rf"^  {card_rows.in_logs('diagnose.card.cause')}(?=[a-z_]+: )")
_LAUNCHER = ("ChildFailedError", "ProcessExitedException", "SignalException", "CalledProcessError")
GOES_ON = 3  # progress lines after an apparent failure that refute it


def read(end: str) -> tuple[str | None, str | None]:
    """(FINISHED, FAILED or None; the last exception or another reason)."""
    segments = [s for s in re.split(r"[\r\n]+", end) if s.strip()]
    read_lines = []
    for number, raw in enumerate(segments):
        text, rank = prefixes.split(_plain(raw))
        read_lines.append(LogLine(number, text.rstrip(), rank, raw, number))
    finished = _last(read_lines, _ends_well)
    failure, place = _failure(read_lines)
    # a script prints `Job finished` after a failure, too: only a step between them refutes it
    by_program = _last(read_lines, progress_marks.ends_by_program) > place
    refuted = GOES_ON if place >= finished else 0 if by_program else 1
    if failure is not None and _steps_after(read_lines, place) < refuted:
        return FAILED, failure
    if finished >= 0 and _steps_after(read_lines, finished) == 0:
        return FINISHED, None
    return None, None


def _plain(raw: str) -> str:
    return line_parser.COLOUR.sub("", raw) if "\x1b" in raw else raw


def _ends_well(text: str) -> bool:
    known = _FINISHED.search(text) is not None or progress_marks.ends_well(text) is True
    return known and not _fails(text)


def _fails(text: str) -> bool:
    dead = _DEATH.search(text) or _CARD.search(text)
    return dead is not None or progress_marks.ends_well(text) is False


def _last(found: list[LogLine], fits: Callable[[str], bool]) -> int:
    for one in reversed(found):
        if len(one.text) < line_parser.LONG and fits(one.text):
            return one.number
    return -1


def _steps_after(found: list[LogLine], place: int) -> int:
    """Progress lines after it. A complete bar does not count: many programs redraw it."""
    later = (one.raw for one in found[place + 1 :] if not one.raw.startswith(card_rows.QUOTED))
    facts = map(line_parser.parse, later)
    return sum(1 for fact in facts if fact and fact.tells and not fact.complete and not fact.scores)


def _failure(found: list[LogLine]) -> tuple[str | None, int]:
    deadly = [t for t in traceback.read(found) if t.end and not t.harmless and not t.in_thread]
    causes = [t for t in deadly if not t.type.endswith(_LAUNCHER)] or deadly
    death = _last(found, _fails)
    place = max([death, *(t.last for t in deadly)])
    if place < 0:
        return None, -1
    if causes:
        cause = causes[-1]
        message = f"{cause.type}: {cause.text}" if cause.text else cause.type
        where = f"rank {cause.rank}: " if cause.rank is not None else ""
        return (where + message.strip())[:SHOWN], place
    return _CARD.sub("", found[death].text).strip()[:SHOWN], place
