"""Separate jobs in one log, as schedulers append them to a file: the last one is diagnosed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from training.diagnose.log_line import decoded, split
from training.diagnose.scan import (
    JOB,
    JOB_HEADER,
    OUTPUT_ABOVE,
    OUTPUT_BELOW,
    REPORT,
    LogSpan,
    Places,
)
from training.diagnose.source import LogSource

# a line with the number of the job alone
OWN_LINE = re.compile(rf"[\s#=*>-]*(?P<name>{JOB})(?P<number>\d{{3,}})(?:[.\[]\S*)?[\s#=*<-]*")
OF_REPORT = re.compile(r"\s*(?:PS:|Read file <.*> for stderr output of this job\.)?\s*")
KEYS = (REPORT, OUTPUT_ABOVE, OUTPUT_BELOW, JOB_HEADER)
LONGEST = 4096  # bytes of a line that are read


def last(source: LogSource, places: Places) -> tuple[int, Places]:
    """(number of jobs in the log, places of the last one), to which `source` is limited. 1 where
    nothing separates any."""
    starts = _starts(source, [place for place in places.found if place.key in KEYS])
    if starts:
        begin = starts[-1]
        source.since, source.line = begin.offset, begin.line
        found = [place for place in places.found if place.offset >= begin.offset]
        places = replace(places, found=found)
    return 1 + len(starts), places


def _starts(source: LogSource, places: Sequence[LogSpan]) -> list[LogSpan]:
    """The first line of each job but the first."""
    starts, report = [], None
    reports = 0  # that precede their output
    for place in places:
        if place.key == REPORT:
            report = place
        elif place.key == OUTPUT_BELOW and report:
            reports += 1
            if reports > 1 or _has_text(source, report):
                starts.append(report)
        elif place.key == OUTPUT_ABOVE and (begin := _after_report(source, place)):
            starts.append(begin)
    return starts or _by_number(source, [place for place in places if place.key == JOB_HEADER])


def _by_number(source: LogSource, headers: Sequence[LogSpan]) -> list[LogSpan]:
    """A header with another number than the one before. Numbers that return are those of jobs that
    run at the same time, or of parts of one."""
    starts: list[LogSpan] = []
    seen: list[tuple[str, str]] = []
    for place in headers:
        line = next(_lines(source, place), (place, ""))[1]
        if not (found := OWN_LINE.fullmatch(line)):
            continue
        number = (found["name"], found["number"])
        if seen and number == seen[-1]:
            continue
        if number in seen:
            return []
        if any(name == number[0] for name, _ in seen):
            starts.append(place)
        seen.append(number)
    return starts


def _after_report(source: LogSource, place: LogSpan) -> LogSpan | None:
    """The first line of the next job."""
    lines = _lines(source, place)
    next(lines, None)
    return next((at for at, text in lines if not OF_REPORT.fullmatch(text)), None)


def _has_text(source: LogSource, place: LogSpan) -> bool:
    """Is there more than the line above the report before it?"""
    source.file.seek(source.since)
    before = source.file.read(min(place.offset - source.since, LONGEST))
    return bool(before.strip(b"-\r\n\t "))


def _lines(source: LogSource, place: LogSpan) -> Iterator[tuple[LogSpan, str]]:
    """The lines from `place` on, without a launcher's prefix."""
    offset, number = place.offset, place.line
    while True:
        source.file.seek(offset)
        raw = source.file.readline(LONGEST)
        if not raw:
            return
        yield LogSpan(place.key, number, offset), split(decoded(raw).rstrip("\r\n"))[0]
        offset, number = offset + len(raw), number + raw.count(b"\n")
