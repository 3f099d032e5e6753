"""Diagnosis of logs as one record: the output of --json and the content of the card."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import cause_ids, console_run, exit_status, run_reader
from training.core.cause_ids import EXIT_STATUS, NONE, RAISED, UNKNOWN
from training.core.errors import Problem, UserError
from training.core.jsonl import mtime
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.units import plural
from training.diagnose import run_files, signatures
from training.diagnose.advice import advice, by_frames, filled, of_end, of_kind, values
from training.diagnose.events import LOST, OWN, Event
from training.diagnose.health import BROKEN_OFF, NO_SIGN
from training.diagnose.jobs import JobCount
from training.diagnose.log_analysis import LogAnalysis, read
from training.diagnose.log_line import LogLine, shown
from training.diagnose.root_cause import RootCause, driver_warnings, find_root_cause
from training.diagnose.scan import scan
from training.diagnose.source import LogSource, logs_in, rank_of

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import DiagnosisRecord, EndRecord

SHOWN_LINES = 10
SCHEMA_VERSION = 1


def diagnose(paths: Sequence[Path | None]) -> DiagnosisRecord:
    """`paths`: logs, folders of logs, run directories; None is standard input. Raises OSError."""
    run = next((r for path in paths if path and (r := run_files.run_of(path))), None)
    plan = run_reader.read_plan(run.plan) if run else None
    end = run_files.ended(run) if run else None
    # A user script that exits with 0 may have trained on NaN: its log decides.
    by_log = end is not None and end["cause"] == NONE and bool(plan and plan.get("script"))
    if run and end and not by_log:
        return _of_run(end, run, plan)
    own = run_files.reported(run) if run else []
    ranks: list[tuple[Path | None, int | None]] = []  # of the logs
    for path in paths:
        logs: Sequence[Path | None] = [path]
        errors: Sequence[Path] = []
        if path and path.is_dir():
            logs, errors = _of_folder(path)
        own += run_files.of_files(
            e for e in errors if run is None or run.path not in e.absolute().parents
        )
        for log in logs:
            name = str(log.relative_to(path) if path and log != path else log.name) if log else ""
            ranks.append((log, rank_of(name, alone=len(paths) == len(logs) == 1)))
    analyses = _analyses(ranks)
    found = find_root_cause(analyses, own)
    if run and end and found.cause != cause_ids.NAN_LOSS:
        return _of_run(end, run, plan)
    nothing = found.cause == UNKNOWN and (
        found.event is None or found.event.role in (NO_SIGN, BROKEN_OFF)
    )
    doing = run_files.alive(run) if run and (nothing or found.cause == NONE) else ""
    if nothing and doing:
        found = RootCause(NONE)
    record = _record(found, run, plan)
    if (count := _jobs(found, analyses)).number > 1:
        record["jobs"] = count.number
        if not count.exact:
            record["jobs_at_least"] = True
    if doing:
        record["summary"] = doing
    elif nothing and not any(analysis.lines for analysis in analyses):
        record["summary"] = (
            msg("diagnose.binary") if len(analyses) < len(ranks) else msg("diagnose.empty")
        )
    return record


def _analyses(ranks: Sequence[tuple[Path | None, int | None]]) -> list[LogAnalysis]:
    """Binary logs are left out. A date without a year needs one of another log, which may be
    read later: then its log is read again."""
    found: list[LogAnalysis] = []
    undated: list[tuple[int, Path, int | None]] = []
    for log, rank in ranks:
        one = _analysis(log, rank, found[-1].near if found else None)
        # a pipe can be read only once
        if one and one.near is None and one.times and log and log.is_file():
            undated.append((len(found), log, rank))
        found += [one] if one else []
    near = found[-1].near if found else None
    for index, log, rank in undated if near is not None else ():
        found[index] = _analysis(log, rank, near) or found[index]
    return found


def _analysis(log: Path | None, rank: int | None, near: float | None) -> LogAnalysis | None:
    # one at a time: a folder may hold more than may be open
    with contextlib.closing(LogSource(log, rank)) as source:
        return None if source.binary else read(source, scan(source), near)


def _of_folder(path: Path) -> tuple[Sequence[Path | None], Sequence[Path]]:
    """(logs, error files) of a folder. Raises UserError: no log, or several Duet runs."""
    runs = (
        []
        if (path / "plan.json").exists()
        else sorted({p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/plan.json")})
    )
    if len(runs) > 1:
        raise _several(path, len(runs), max(runs, key=lambda r: mtime(r / "plan.json") or 0.0))
    logs, errors = logs_in(path)
    named = {log: start.folder.name for log in logs if (start := console_run.last_start(log))}
    if (count := len(set(named.values()))) > 1:  # Duet's folder of console logs
        raise _several(path, count, max(named, key=lambda log: mtime(log) or 0.0))
    if not logs and not errors and not (path / "plan.json").exists():
        raise UserError(
            Problem("log.none", msg("diagnose.no_log", path=path), msg("diagnose.text_files"))
        )
    return logs, errors


def _several(folder: Path, runs: int, newest: Path) -> UserError:
    return UserError(
        Problem(
            "log.several_runs",
            msg("diagnose.several_runs", path=folder, runs=runs),
            msg("diagnose.one_run"),
            [f"./duet diagnose {shlex.quote(str(newest))}"],
        )
    )


def _of_run(end: EndRecord, run: RunDir, plan: Plan | None) -> DiagnosisRecord:
    """The run's own record: the supervisor's verdict, or its regular end."""
    known = values(run, plan) if plan else {}
    cause = end["cause"]
    record: DiagnosisRecord = {
        "schema_version": SCHEMA_VERSION,
        "cause": cause,
        "rank": end["rank"],
        "line": None,
        "evidence": end["summary"] if cause != NONE else "",
        "confidence": "high",
        "summary": end["summary"],
        "advice": _advice(end, known),
        "also": [],
        "title": _title(cause),
        "file": str(run.failure if "exit_code" in end else run.summary),
        "where": end["where"],
        "lines": [*end["evidence"], *(end["kernel"]["lines"] if "kernel" in end else [])],
        "signature": None,
        "source": signatures.causes()[cause].source,
        "run": str(run.path),
    }
    if isinstance(ranks := end.get("ranks"), list):
        record["ranks"] = ranks
    if isinstance(phase := end.get("phase"), str):
        record["phase"] = phase
    if isinstance(gpu := end.get("gpu"), int):
        record["gpu"] = gpu
    if isinstance(process := end.get("process"), int):
        record["process"] = process
    if "memory" in end:
        record["memory"] = end["memory"]
    if "occupied" in end:
        record["occupied"] = end["occupied"]
    return record


def _advice(end: EndRecord, known: Mapping[str, str]) -> list[str]:
    """As on the failure card where a message of the kernel has decided it."""
    if end["cause"] == NONE and not end.get("torn_down"):
        return []
    by_kernel = "kernel" in end and end["kernel"]["lines"]
    return (by_kernel and end.get("advice")) or of_end(end, None, {}, known)


def _record(found: RootCause, run: RunDir | None, plan: Plan | None) -> DiagnosisRecord:
    event = found.event
    signature = event.signature if event else None
    groups = event.hit.groups if event and event.hit else {}
    if event and event.thrown:
        groups = {**groups, **by_frames(event.thrown.frames)}
    line = (event.hit.line if event.hit else event.line) if event else None
    known = values(run, plan) if run and plan else None
    vanished = bool(run and event and event.file == run.supervisor)
    return {
        "schema_version": SCHEMA_VERSION,
        "cause": found.cause,
        "rank": found.rank,
        "line": line.number if line else None,
        "evidence": shown(line.text if line else "", event.hit.start if event and event.hit else 0),
        "confidence": found.confidence,
        "summary": _summary(found, groups),
        "advice": [
            *(of_kind("vanished", known or {}) if vanished else []),
            *(
                of_kind("native_exception", known or {})
                if event and event.thrown and event.thrown.native
                else advice(found.cause, signature, groups, known)
            ),
        ],
        "also": found.also,
        "title": _title(found.cause),
        "file": (event.analysis.source.name if event.analysis else str(event.file or ""))
        if event
        else None,
        "where": event.where if event else None,
        "lines": _around(event) if event else [],
        "signature": signature.id if signature else None,
        "source": signature.source if signature else signatures.causes()[found.cause].source,
        "run": str(run.path) if run else None,
    }


def _jobs(found: RootCause, analyses: Sequence[LogAnalysis]) -> JobCount:
    """Separate jobs in the log of the cause."""
    analysis = found.event.analysis if found.event else None
    counts = [a.jobs for a in ([analysis] if analysis else analyses)]
    return max(counts, key=lambda count: count.number, default=JobCount())


def _title(cause: str) -> str:
    return signatures.causes()[cause].title.sentences()[0]


def _summary(found: RootCause, groups: dict[str, str]) -> str:
    signature = found.event.signature if found.event else None
    if signature and (says := filled(signature.says, groups)):
        return says[0]
    if found.event and found.event.text and found.event.role == OWN:
        return shown(found.event.text.splitlines()[0])
    if (
        found.event
        and found.event.role == LOST
        and found.cause in (UNKNOWN, EXIT_STATUS)
        and found.status is not None
    ):
        return exit_status.how(found.status)  # of the rank that failed first
    if found.event and found.event.role == BROKEN_OFF:
        return msg("diagnose.broken_off")
    if found.event and found.event.role == NO_SIGN:
        return msg("diagnose.no_sign")
    if found.cause in (UNKNOWN, RAISED) and found.event:
        where = f" ({found.event.where})" if found.event.where else ""
        return shown(_message(found.event)) + where
    if found.cause == NONE and (warned := driver_warnings(found.recovered)):
        hit = warned[0].hit
        return msg("diagnose.on_cpu", why=filled(hit.signature.says, hit.groups)[0] if hit else "")
    if found.cause == NONE and found.recovered:
        failures = plural(len(found.recovered), "failure")
        return msg("diagnose.recovered", failures=failures)
    if found.cause == NONE and found.confidence != "high":
        return msg("diagnose.no_end")
    return _title(found.cause)


def _message(event: Event) -> str:
    """The line of an event, with the assertion for an exception without a message."""
    thrown = event.thrown
    text = event.line.text.strip()
    return (
        f"{text}: {thrown.asserted.text.strip()}"
        if thrown and thrown.asserted and thrown.end is event.line
        else text
    )


def _around(event: Event) -> list[str]:
    """Evidence: the end of the traceback, or the lines around the event."""
    analysis = event.analysis
    if analysis is None:
        return event.text.splitlines()[-SHOWN_LINES:]
    own = [
        line for line in analysis.lines if line.rank == event.line.rank or event.line.rank is None
    ]
    index = next((i for i, line in enumerate(own) if line.offset == event.line.offset), None)
    if index is None:
        return [shown(event.line.raw)]
    before = SHOWN_LINES - 2 if event.thrown else SHOWN_LINES // 2 - 1
    return [shown(line.text) for line in _near(own, index, before)]


def _near(lines: Sequence[LogLine], index: int, before: int) -> Sequence[LogLine]:
    return lines[max(0, index - before) : index + SHOWN_LINES - before]
