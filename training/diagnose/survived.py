"""Whether training continued after an apparent failure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from training.core import cause_ids
from training.diagnose import progress_marks
from training.diagnose.events import Event
from training.diagnose.log_analysis import LogAnalysis
from training.diagnose.traceback import EXCEPTION

# How often a step count must grow after an apparent failure before it counts as survived. A program
# that dies of an exception may still flush a buffer (8 KiB), so a mere log message needs less.
GROWN_LOGGED, GROWN_THROWN = 2, 3
BUFFER = 16 << 10
# A scheduler that stops a job grants it some time: a training that ignores the signal counts
# until it is killed.
GRACE_STEPS, GRACE_S = 100, 150.0
# torchrun has a folder of logs for each attempt.
ATTEMPT = re.compile(r"(?P<run>.*)\battempt_(?P<number>\d+)/", re.ASCII)
BEGINS = re.compile(
    r"\b(?:resum|restore|restoring|restart|requeu)|\bload(?:ed|ing)?\b.{0,60}\b(?:checkpoint|ckpt|state)"
    r"|\bstart(?:ed|ing)?\b.{0,30}\b(?:train|job|run|attempt)",
    re.I,
)


def earlier_attempts(names: Iterable[str]) -> set[str]:
    """Those files that are of an attempt which a later one has followed."""
    places = {name: place for name in names if (place := ATTEMPT.match(name))}
    last: dict[str, int] = {}
    for place in places.values():
        last[place["run"]] = max(int(place["number"]), last.get(place["run"], 0))
    return {name for name, place in places.items() if int(place["number"]) < last[place["run"]]}


def with_times(analyses: Sequence[LogAnalysis]) -> list[LogAnalysis]:
    """Logs of which all steps have times."""
    return [
        analysis
        for analysis in analyses
        if all(mark.time is not None for mark in analysis.marks)
        and _grown(analysis) >= GROWN_THROWN
    ]


def survived_elsewhere(analysis: LogAnalysis, offset: int, timed: Sequence[LogAnalysis]) -> bool:
    """Whether training continued after a failure by the logs of other machines (`with_times`),
    where its own one is of ranks and has no steps: that of the kernel may be in another time zone.
    `offset`: of its last line; the next time in the log is certainly not before it."""
    time = analysis.times.from_(offset) if timed else None
    if time is None or not analysis.of_ranks or _grown(analysis) >= GROWN_THROWN:
        return False
    after = time + GRACE_S
    return any(
        (other.marks[-1].time or 0) > after and _grown(other, after) >= GROWN_THROWN
        for other in timed
    )


def _grown(analysis: LogAnalysis, since: float | None = None) -> int:
    return progress_marks.rises_after(analysis.marks, -1, since, None)


def survived(analysis: LogAnalysis, event: Event) -> bool:
    """Whether training continued after the event in the same log."""
    offset = event.last
    if offset < analysis.output:
        return False
    thrown = event.thrown is not None or EXCEPTION.match(event.line.text) is not None
    failed = max(offset, analysis.failed)
    last = max((m.offset for m in analysis.marks), default=-1)
    # what follows the launcher's report is not from the process that failed
    late = not (offset < failed < last) and _late(analysis, event, offset)
    # training on NaN may well finish
    if analysis.ends_well > failed and event.cause != cause_ids.NAN_LOSS:
        # a script prints `Job finished` after a failure, too
        fatal = thrown or analysis.failed >= offset
        flushed = late and analysis.ends_unlike_script <= failed
        if not fatal or analysis.ends_by_program > failed or (last > failed and not flushed):
            return True
    if event.line.offset < analysis.started:
        return True  # from an earlier start in the same log
    grown = progress_marks.rises_after(analysis.marks, offset, event.time, event.line.rank)
    if (
        event.cause in cause_ids.STOPPED.values()
        and event.thrown is None
        and _in_grace(analysis, event, grown)
    ):
        return False
    if not thrown:
        return grown >= GROWN_LOGGED
    if late:
        # its launcher would have reported the failure
        return event.line.rank is not None and analysis.failed < offset
    timed = event.time is not None and any(
        m.time is not None and m.time > event.time for m in analysis.marks
    )
    return grown >= (GROWN_LOGGED if timed else GROWN_THROWN) and analysis.failed < last


def _late(analysis: LogAnalysis, event: Event, offset: int) -> bool:
    """Whether all counts after the event may be what its process wrote as it ended."""
    return progress_marks.buffered(
        analysis.marks, event.line.offset
    ) and progress_marks.may_be_late(analysis.marks, offset, event.time, BUFFER)


def _in_grace(analysis: LogAnalysis, event: Event, grown: int) -> bool:
    """Whether the counts after a stop from outside only continue where they were, for a short time.
    A job that was requeued starts again at a checkpoint."""
    offset = event.line.offset
    first = min((m.offset for m in analysis.marks if m.offset > offset), default=offset)
    if any(BEGINS.search(x.text) for x in analysis.lines if offset < x.offset <= first):
        return False
    last = max((m.time for m in analysis.marks if m.time is not None), default=None)
    long = event.time is not None and last is not None and last - event.time > GRACE_S
    return not long and grown <= GRACE_STEPS and progress_marks.continues(analysis.marks, offset)
