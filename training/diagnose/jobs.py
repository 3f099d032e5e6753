"""Separate jobs in one log, as schedulers append them to a file: the last one is diagnosed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.diagnose import progress_marks
from training.diagnose.log_line import decoded, split
from training.diagnose.scan import (
    JOB,
    JOB_HEADER,
    OUTPUT_ABOVE,
    OUTPUT_BELOW,
    REPORT,
    TRACEBACK,
    LogSpan,
    Places,
)
from training.diagnose.signatures import ROOT, VICTIM, WEAK, signatures
from training.diagnose.source import COLOUR, LogSource

# a line with the number of the job alone
OWN_LINE = re.compile(rf"[\s#=*>-]*(?P<name>{JOB})(?P<number>\d{{3,}})(?:[.\[]\S*)?[\s#=*<-]*")
# seff and jobstats print the number too, but at the end of a job
STATE = re.compile(
    r"\s*State: (?:BOOT_FAIL|CANCELLED|COMPLETED|COMPLETING|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY"
    r"|PREEMPTED|REQUEUED|RUNNING|TIMEOUT)\b.*"
)
STATE_WITHIN = 8  # lines
OF_REPORT = re.compile(
    r"\s*(?:PS:|Read file <.*> for stderr output of this job\."
    r"|Fail to open stderr file .*|The stderr output is included in this report\.)?\s*"
)
KEYS = (REPORT, OUTPUT_ABOVE, OUTPUT_BELOW, JOB_HEADER)
LONGEST = 4096  # bytes of a line that are read
MUCH = 64 << 10  # bytes: more than a batch script prints around a training


@dataclass(frozen=True)
class JobCount:
    number: int = 1
    exact: bool = True  # False: there are more, of which the scan has not kept the places


def last(source: LogSource, places: Places) -> tuple[JobCount, Places]:
    """(jobs in the log, places of the last one), to which `source` is limited. One job where
    nothing separates any."""
    starts = _starts(source, places)
    if not starts:
        return JobCount(), places
    begin = starts[-1]
    source.since, source.line = begin.offset, begin.line
    found = [place for place in places.found if place.offset >= begin.offset]
    count = JobCount(1 + len(starts), exact=places.dropped.isdisjoint(KEYS))
    return count, replace(places, found=found)


def _starts(source: LogSource, places: Places) -> list[LogSpan]:
    """The first line of each job but the first."""
    return _by_report(source, places) or _by_number(source, places)


def _by_report(source: LogSource, places: Places) -> list[LogSpan]:
    starts, report = [], None
    reports = 0  # that precede their output
    for place in places.found:
        if place.key == REPORT:
            report = place
        elif place.key == OUTPUT_BELOW and report:
            reports += 1
            if reports > 1 or _has_text(source, report):
                starts.append(report)
        elif place.key == OUTPUT_ABOVE:
            starts.append(_after_report(source, place))
    # After the last report there may be a job that still runs, or other text: of LSF, of a script.
    running = bool(starts and report and report.offset < starts[-1].offset)
    if running and not _trained(source, places, starts[-1].offset, places.size):
        starts.pop()
    return starts


def _by_number(source: LogSource, places: Places) -> list[LogSpan]:
    """A job starts at a header with a new number, or after the footer of another job. Numbers that
    return are those of jobs that run at the same time, or of parts of one."""
    starts: list[LogSpan] = []
    job_of: dict[str, int] = {}  # by number
    name = ""  # in the first header
    ended: LogSpan | None = None  # end of the last footer
    for place in places.found:
        if place.key != JOB_HEADER or not (found := OWN_LINE.fullmatch(_line(source, place))):
            continue
        footer = _after_footer(source, place)
        if (job := job_of.get(found["number"])) is not None:
            if job != len(starts):
                return []
            ended = footer or ended
            continue
        if ended:
            starts.append(ended)
        elif job_of:
            if footer or found["name"] != name:
                continue  # of another job, or of another program
            starts.append(place)
        elif not footer and _trained(source, places, source.since, place.offset):
            return []  # not a header
        job_of[found["number"]] = len(starts)
        ended = footer
        if not footer:
            name = name or found["name"]
    if ended:
        starts.append(ended)
    # A failing job may print the number of one that it has submitted.
    while starts and not _trained(source, places, starts[-1].offset, places.size):
        starts.pop()
    return starts


def _trained(source: LogSource, places: Places, start: int, end: int) -> bool:
    """Whether this part of the log shows a training: step counts, a failure, or much text."""
    if end - start > MUCH:
        return True
    failures = {TRACEBACK} | {s.id for s in signatures() if s.role in (ROOT, WEAK, VICTIM)}
    if any(start <= place.offset < end and place.key in failures for place in places.found):
        return True
    for at, text in _lines(source, LogSpan("", 0, start)):
        if at.offset >= end:
            break
        if any(progress_marks.marks(part, 0, None, None) for part in text.split("\r")):
            return True
    return False


def _after_footer(source: LogSource, place: LogSpan) -> LogSpan | None:
    """The line after the state of the job, if `place` starts such a footer."""
    lines = _lines(source, place)
    next(lines, None)
    for _, (_, text) in zip(range(STATE_WITHIN), lines, strict=False):
        if OWN_LINE.fullmatch(text):
            break
        if STATE.fullmatch(text):
            return next(lines, (LogSpan(place.key, 0, source.size()), ""))[0]
    return None


def _after_report(source: LogSource, place: LogSpan) -> LogSpan:
    """The first line of the next job, or the log's end."""
    lines = _lines(source, place)
    next(lines, None)
    end = LogSpan(place.key, 0, source.size())
    return next((at for at, text in lines if not OF_REPORT.fullmatch(text)), end)


def _has_text(source: LogSource, place: LogSpan) -> bool:
    """Is there more than the line above the report before it?"""
    source.file.seek(source.since)
    before = source.file.read(min(place.offset - source.since, LONGEST))
    return bool(before.strip(b"-\r\n\t "))


def _line(source: LogSource, place: LogSpan) -> str:
    return next((text for _, text in _lines(source, place)), "")


def _lines(source: LogSource, place: LogSpan) -> Iterator[tuple[LogSpan, str]]:
    """The lines from `place` on, without colours and a launcher's prefix."""
    offset, number = place.offset, place.line
    while True:
        source.file.seek(offset)
        raw = source.file.readline(LONGEST)
        if not raw:
            return
        text = decoded(COLOUR.sub(b"", raw)).rstrip("\r\n")
        yield LogSpan(place.key, number, offset), split(text)[0]
        offset, number = offset + len(raw), number + raw.count(b"\n")
