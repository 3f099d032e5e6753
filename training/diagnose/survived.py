"""Whether training continued after an apparent failure."""

from __future__ import annotations

from training.diagnose import progress_marks
from training.diagnose.events import Event
from training.diagnose.log_analysis import LogAnalysis
from training.diagnose.traceback import EXCEPTION

NAN = "nan_loss"  # training on NaN may well finish
# How often a step count must grow after an apparent failure before it counts as survived. A program
# that dies of an exception may still flush a buffer (8 KiB), so a mere log message needs less.
GROWN_LOGGED, GROWN_THROWN = 2, 3
BUFFER = 16 << 10


def survived(analysis: LogAnalysis, event: Event) -> bool:
    """Whether training continued after the event in the same log."""
    offset = event.thrown.last if event.thrown else event.line.offset
    if analysis.ends_well > max(offset, analysis.failed) and event.cause != NAN:
        return True
    if event.line.offset < analysis.started:
        return True  # from an earlier start in the same log
    grown = progress_marks.rises_after(analysis.marks, offset, event.time, event.line.rank)
    if event.thrown is None and not EXCEPTION.match(event.line.text):
        return grown >= GROWN_LOGGED
    if not progress_marks.began_before(
        analysis.marks, event.line.offset
    ) and progress_marks.may_be_late(analysis.marks, offset, BUFFER):
        # its launcher would have reported the failure
        return event.line.rank is not None and analysis.failed < offset
    timed = event.time is not None and any(
        m.time is not None and m.time > event.time for m in analysis.marks
    )
    return (
        grown >= (GROWN_LOGGED if timed else GROWN_THROWN)
        and analysis.failed < analysis.marks[-1].offset
    )
