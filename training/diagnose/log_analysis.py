"""Analysis of one log around the places of the scan: signature matches, tracebacks, progress, and
the end as the launcher reports it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from training.core.console_run import RUN_DIRECTORY
from training.diagnose import (
    card_rows,
    enqueued,
    jobs,
    log_windows,
    native_exception,
    patterns,
    progress_marks,
    rank_table,
    signatures,
    traceback,
)
from training.diagnose.enqueued import Enqueued
from training.diagnose.jobs import JobCount
from training.diagnose.log_line import TIMED, LogLine, full_time_of, said_by, time_of
from training.diagnose.log_times import LogTimes
from training.diagnose.scan import OUTPUT_BELOW, Places, recognised
from training.diagnose.signatures import ROOT, WEAK, Signature
from training.diagnose.source import LogSource
from training.diagnose.traceback import EXCEPTION, NEW_MESSAGE, SPAWNED, Traceback
from training.diagnose.world_size import world_size

MESSAGE_LINES = 12  # of an exception
NO_FAILURE = re.compile(r"NCCL INFO")  # NCCL logs its attempts there
# Mere messages: Python's warnings, or a program that continues.
MERELY = re.compile(r"\b[A-Z]\w*Warning: ")
GOES_ON = re.compile(
    r"\b(?:[Ss]kip(?:ping|ped|s)?|[Ii]gnor(?:ing|ed)|[Cc]ontinuing|[Rr]ecover(?:ed|ing)"
    r"|going on|will ?[Rr]etry(?!=0)|[Rr]etr(?:ying|ied|y (?:in|after)))\b"  # language: quoted
)
CARD = re.compile(rf"^  {card_rows.in_logs('diagnose.card.cause')}([a-z_]+): (.*)")
CARD_DETAIL = re.compile(rf"^  {' ' * card_rows.COLUMN}(\S.*)")  # below the title of the cause
CARD_WHO = re.compile(rf"^  {card_rows.in_logs('diagnose.card.who')}rank (\d+)")
LAST_LINES = 30  # lines at the end in which an exception without a traceback counts
START = re.compile(
    r"^nohup: ignoring input|Setting OMP_NUM_THREADS environment variable|\[runner\.py:\d+:\w+\] "
    rf"|\] Setting ds_accelerator to|{RUN_DIRECTORY}"
    r"|^(?:#|=|-|>|\*){2,} ?.{0,30}\b(?:start|attempt|retry|launch|restart)(?:ing|ed)?\b|^\++ "
    r"(?:torchrun|python|srun|accelerate)\b"
)
EXITED = "Exited "  # in a report of LSF
FAILED_END = re.compile(
    r"ChildFailedError|CalledProcessError|exits with return code = "
    r"-?[1-9]|ProcessRaisedException|ProcessExitedException"
    r"|[Ee]xited with (?:exit )?code -?[1-9]|^Exited (?:by signal|with signal termination)"
    r"|Segmentation fault|core dumped|Root Cause \(first "
    r"observed failure\)"
    r"|torchelastic\.worker\.status\.FAILED|[Ww]orker group finished \(FAILED\)"
    r"|failed \(exitcode: -?[1-9]|returned non-zero exit status|Sending process \d+ closing signal"
    r"|process exited, code=(?:exited, status=[1-9]|killed|dumped)"  # systemd
    r"|line \d+: +\d+ (?:Bus error|Floating point exception|Illegal instruction)"
    r"|(?:^|: |\d )(?:Aborted|Terminated|Killed)\s*(?:\(core dumped\)\s*)?(?:$| {2})"
)


@dataclass
class SignatureMatch:
    """A match of a signature in a log."""

    signature: Signature
    line: LogLine
    groups: dict[str, str]
    start: int  # character in the line
    length: int  # of the match, without the values that it captures
    rank: int | None
    time: float | None
    thrown: Traceback | None = None


@dataclass
class LogAnalysis:
    source: LogSource
    lines: list[LogLine]
    near: float | None = None  # a time with a year
    hits: list[SignatureMatch] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    natives: list[Traceback] = field(default_factory=list)  # C++ exceptions
    marks: list[progress_marks.ProgressMark] = field(default_factory=list)
    reported: list[rank_table.Reported] = field(default_factory=list)
    launcher: bool = False  # it has lines of a launcher of several ranks
    of_ranks: bool = False  # it has such lines, or names ranks
    enqueued: list[Enqueued] = field(default_factory=list)
    spawned: list[tuple[int, int]] = field(default_factory=list)  # (offset, process of mp.spawn)
    # Duet's failure cards: (line, cause, rank, summary)
    cards: list[tuple[LogLine, str, int | None, str]] = field(default_factory=list)
    # exceptions at the end without a traceback
    bare_exceptions: list[LogLine] = field(default_factory=list)
    world: int | None = None
    jobs: JobCount = field(default_factory=JobCount)  # in the log, of which this is the last one
    # offset of the output, where the scheduler's report on its end precedes it
    output: int = -1
    ends_well: int = -1  # offset of the last line that reports a regular end
    # of the last such line that no batch script prints, and of the last that few of them print
    ends_by_program: int = -1
    ends_unlike_script: int = -1
    # offset of the last line in which a launcher or shell reports a failure; the log's end if the
    # scheduler's report before the output does
    failed: int = -1
    failed_line: LogLine | None = None
    trouble: int = -1  # offset of the last exception
    # offsets of a launcher's start messages after a failure
    starts: list[int] = field(default_factory=list)
    started: int = -1  # the last one that more than start messages follow
    times: LogTimes = field(default_factory=LogTimes)


def read(source: LogSource, places: Places, near: float | None = None) -> LogAnalysis:
    """The last job, if the log has several. `near`: a time with a year in another log of the same
    run, for a log without any."""
    count, places = jobs.last(source, places)
    lines = log_windows.lines(source, places)
    below = (place.offset for place in places.found if place.key == OUTPUT_BELOW)
    analysis = LogAnalysis(source, lines, jobs=count, output=max(below, default=-1))
    analysis.near = next((t for x in lines if (t := full_time_of(x.raw)) is not None), near)
    for line in lines:
        if not line.raw.startswith(card_rows.QUOTED):
            _take(analysis, line)
    analysis.tracebacks = traceback.read(lines)
    for one in analysis.tracebacks:
        if one.logged and analysis.times.reported_late(one.logged.offset, one.last):
            one.logged = None  # another message
    analysis.natives = native_exception.read(lines)
    analysis.reported = rank_table.read(lines)
    analysis.launcher = rank_table.of_launcher(lines)
    named = source.rank is not None or any(line.rank is not None for line in lines)
    analysis.of_ranks = analysis.launcher or named
    _cards(analysis)
    quoted = {
        offset
        for t in analysis.tracebacks
        for offset in t.code
        if not (t.asserted and t.asserted.offset == offset)
    }
    by_offset: dict[int, list[str]] = {}
    for place in places.found:
        by_offset.setdefault(place.offset, []).append(place.key)
    known = _known()
    for line in lines:
        for key in dict.fromkeys(by_offset.get(line.offset, ())):
            if (
                key not in known
                or line.offset in quoted
                or line.raw.startswith(card_rows.QUOTED)
                or NO_FAILURE.search(line.raw)
            ):
                continue
            if (hit := _hit(analysis, line, key)) and not _merely(hit):
                analysis.hits.append(hit)
    _by_frame(analysis)
    taken = {t.end.offset for t in analysis.tracebacks if t.end} | {
        hit.line.offset for hit in analysis.hits
    }
    analysis.started = _started(analysis)
    if exited := _exited(analysis):
        analysis.failed, analysis.failed_line = places.size, exited
    analysis.bare_exceptions = [
        x for x in lines[-LAST_LINES:] if x.offset not in taken | quoted and _is_error(x.text)
    ]
    return analysis


def _started(analysis: LogAnalysis) -> int:
    """The last start message with a sign of training, of an end or of another failure after it."""
    last = max(
        [
            analysis.ends_well,
            analysis.failed,
            analysis.trouble,
            *(mark.offset for mark in analysis.marks),
            *(hit.line.offset for hit in analysis.hits),
        ]
    )
    return max((start for start in analysis.starts if start < last), default=-1)


def _exited(analysis: LogAnalysis) -> LogLine | None:
    """The failure in a scheduler's report before the output. The report also has the user's
    script, so other texts do not count."""
    above = (line for line in analysis.lines if line.offset < analysis.output)
    return next((x for x in above if x.text.startswith(EXITED) and FAILED_END.search(x.text)), None)


def _is_error(text: str) -> bool:
    found = EXCEPTION.match(text)
    return (
        found is not None
        and bool(found["text"])
        and found["type"].endswith(("Error", "Exception", "Failure", "Invalid", "NotFound"))
    )


def _merely(hit: SignatureMatch) -> bool:
    if hit.thrown or hit.signature.role not in (ROOT, WEAK):
        return False
    if MERELY.search(hit.line.text[: hit.start + 40]):
        return hit.signature.role == ROOT
    return bool(GOES_ON.search(hit.line.text)) and not EXCEPTION.match(hit.line.text)


def _by_frame(analysis: LogAnalysis) -> None:
    """Recognises exceptions that no line names: those without a message by the place that raised
    them (`EOFError:  at …/torch/serialization.py:1886`), those of C++ with their type."""
    named = {id(hit.thrown) for hit in analysis.hits if hit.signature.role in (ROOT, WEAK)}
    for one in (*analysis.tracebacks, *analysis.natives):
        if not one.end or id(one) in named or not (one.frames or one.native):
            continue
        text = f"{one.type}: {one.text}"
        if one.frames:
            files = (frame.rpartition("/")[2].partition(":")[0] for frame in one.frames)
            through = " ".join(dict.fromkeys(files))
            text += f" at {one.frames[-1]}, called by {one.caller}, through {through}"
        for signature in recognised(text)[:1]:
            if signature.role in (ROOT, WEAK):
                time = analysis.times.at(one.end.offset, one.since)
                analysis.hits.append(
                    SignatureMatch(signature, one.end, {}, 0, len(text), one.rank, time, one)
                )


@functools.lru_cache(maxsize=1)
def _known() -> dict[str, Signature]:
    return {s.id: s for s in signatures.signatures()}


def _hit(analysis: LogAnalysis, line: LogLine, key: str) -> SignatureMatch | None:
    signature = _known()[key]
    for text in (line.text, line.raw):
        data = text.encode("utf-8", "replace")
        for pattern in signature.patterns:
            if found := patterns.compiled(pattern).search(data):
                groups = patterns.groups(found)
                thrown = _thrown(analysis.tracebacks, analysis.lines, line)
                own = int(groups["rank"]) if groups.get("rank", "").isdigit() else None
                rank = own if own is not None else line.rank
                if rank is None and thrown:
                    rank = thrown.rank
                if rank is None:
                    rank = said_by(line.text)
                start = len(data[: found.start()].decode("utf-8", "replace"))
                return SignatureMatch(
                    signature,
                    line,
                    groups,
                    start,
                    found.end() - found.start() - sum(map(len, groups.values())),
                    rank,
                    analysis.times.at(line.offset, thrown.since if thrown else None),
                    thrown,
                )
    return None


def _thrown(
    tracebacks: Sequence[Traceback], lines: Sequence[LogLine], line: LogLine
) -> Traceback | None:
    """The traceback whose exception or message contains this line."""
    for one in tracebacks:
        if one.asserted is line or (one.end and one.end.offset == line.offset):
            return one
        if (
            one.end
            and one.end.offset < line.offset
            and line.number - one.end.number <= MESSAGE_LINES
            and one.rank == line.rank
        ):
            between = [x for x in lines if one.end.offset <= x.offset <= line.offset]
            # no empty line
            whole = all(b.number - a.number <= 1 for a, b in itertools.pairwise(between))
            if whole and not any(_begins(x, one.end) for x in between[1:] if x.rank == one.rank):
                return one
    return None


def _begins(line: LogLine, before: LogLine) -> bool:
    """Whether a line cannot continue the message of the exception in `before`."""
    timed = TIMED.match(line.raw) is not None and TIMED.match(before.raw) is None
    return timed or NEW_MESSAGE.match(line.text) is not None


def _take(analysis: LogAnalysis, line: LogLine) -> None:
    """Adds the facts of a single line."""
    fails = FAILED_END.search(line.text) is not None
    if (time := time_of(line.raw, analysis.near)) is not None:
        reported = fails or rank_table.TIME.match(line.text) is not None
        analysis.times.add(line.offset, time, reported=reported)
    analysis.marks += progress_marks.marks(line.text, line.offset, time, line.rank)
    well = progress_marks.ends_well(line.text)
    if well:
        analysis.ends_well = line.offset
        if progress_marks.ends_by_program(line.text):
            analysis.ends_by_program = line.offset
        if not progress_marks.ends_by_script(line.text):
            analysis.ends_unlike_script = line.offset
    if well is False or fails:
        if line.offset > analysis.output:
            analysis.failed, analysis.failed_line = line.offset, line
    elif "Traceback (most recent call last" in line.text or EXCEPTION.match(line.text):
        analysis.trouble = line.offset
    elif START.search(line.text) and max(analysis.failed, analysis.trouble) > max(
        analysis.starts, default=-1
    ):
        analysis.starts.append(line.offset)
    if analysis.world is None:
        analysis.world = world_size(line.text)
    if last := enqueued.of_line(line):
        analysis.enqueued.append(last)
    if spawned := SPAWNED.search(line.text):
        analysis.spawned.append((line.offset, int(spawned["process"])))


def _cards(analysis: LogAnalysis) -> None:
    for index, line in enumerate(analysis.lines):
        if found := CARD.search(line.text):
            rank = next(
                (
                    int(m[1])
                    for after in analysis.lines[index : index + 3]
                    if (m := CARD_WHO.search(after.text))
                ),
                None,
            )
            below = analysis.lines[index + 1].text if index + 1 < len(analysis.lines) else ""
            detail = CARD_DETAIL.match(below)
            analysis.cards.append((line, found[1], rank, detail[1] if detail else found[2]))
