"""Failures in structured files: Duet's failure.json and rank error files, and torch's error
files."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import cause_ids, console_run, find_run, heartbeat, project, run_reader, standing
from training.core.cause_ids import NONE, RAISED, UNKNOWN
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.rundir import ASKED, RunDir, read_json, read_records
from training.core.units import duration, plural
from training.diagnose import scan, source, traceback
from training.diagnose.events import OWN, UNLISTED, Event
from training.diagnose.log_line import LogLine, shown
from training.diagnose.signatures import CASCADE, EVIDENCE, ROOT, causes

if TYPE_CHECKING:
    from training.core.contracts.verdict import EndRecord

ROOT_FOLDERS = 3  # depth of a log in its run directory: attempt_0/1/stderr.log


def run_of(path: Path) -> RunDir | None:
    """The Duet run of a path: the run directory itself, a path inside it, or the console log of
    its valid start."""
    path = find_run.with_name(path)
    for folder in [path, *path.parents][: ROOT_FOLDERS + 1]:
        if (folder / "plan.json").is_file():
            return RunDir(folder)
    if path.is_file():
        with contextlib.suppress(OSError):
            return console_run.of(path, project.WORK / find_run.EXPERIMENTS)
    return None


def ended(run: RunDir) -> EndRecord | None:
    """The recorded end of a run: the later of failure.json and summary.json; None without
    either."""
    summary, failure = standing.ends(run)
    if (
        failure
        and failure.get("cause") in causes()
        and (not summary or summary.get("time", 0.0) <= failure.get("time", 0.0))
    ):
        if failure.get("torn_down"):  # a script had completed when its process crashed
            failure["cause"] = NONE
        return failure
    if not summary:
        return None
    cause = cause_ids.STOPPED.get(summary.get("exit_code", 0), NONE)
    text = (
        msg("diagnose.run.stopped", steps=summary.get("steps"))
        if cause != NONE
        else msg("diagnose.run.finished")
    )
    restarts = sum(record.get("event") == "restart" for record in read_records(run.events))
    text += msg("diagnose.run.restarts", restarts=plural(restarts, "restart")) if restarts else ""
    return {
        "cause": cause,
        "kind": ASKED,
        "rank": None,
        "status": 0,
        "summary": text,
        "where": None,
        "evidence": [],
        "stacks": None,
    }


def reported(run: RunDir) -> list[Event]:
    """Errors that the ranks reported, or the disappearance of the run."""
    return list(of_files(sorted(run.ranks.glob("rank*.error.json")))) or _vanished(run)


def alive(run: RunDir) -> str:
    """Message with the phase of each rank of a running run; '' if it is not running."""
    supervisor = run_reader.read_supervisor(run.supervisor)
    if not supervisor or not standing.is_active(run, supervisor):
        return ""
    host = standing.elsewhere(supervisor)
    beats = heartbeat.read_all(run.heartbeats)
    phases = "; ".join(
        msg("diagnose.run.rank_ago", rank=b.rank, phase=b, age_s=_since(b) if host else b.age_s)
        for b in beats
    )
    doing = msg("diagnose.run.doing", doing=phases) if phases else ""  # a script has none
    if host:
        ago = duration(standing.quiet_s(run))
        return msg("diagnose.run.alive_elsewhere", host=host, time=ago, doing=doing)
    return msg(
        "diagnose.run.alive",
        doing=doing,
        attach=project.typed("./duet attach"),
        path=shlex.quote(str(run.path)),
    )


def _since(beat: heartbeat.HeartbeatRecord) -> float:
    """Age of a beat of another machine, whose monotonic clock cannot be compared."""
    return max(0.0, time.time() - beat.wall_time)


def _vanished(run: RunDir) -> list[Event]:
    """A run without a recorded end that is no longer active: its last heartbeats."""
    supervisor = run_reader.read_supervisor(run.supervisor)
    if not supervisor or standing.is_active(run, supervisor):
        return []
    beats = heartbeat.read_all(run.heartbeats)
    last = "; ".join(
        f"rank {b.rank}: {b}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(b.wall_time))}"
        for b in beats
    )
    host = None if run.is_archived else standing.elsewhere(supervisor)
    plan = read_json(run.plan) or {}
    if host:
        text = msg("diagnose.run.silent_elsewhere", host=host, time=duration(standing.quiet_s(run)))
    elif standing.is_copy(run, plan):
        text = msg("monitor.reason.copied", folder=plan["run_dir"], resume="")
    else:
        text = msg("diagnose.run.vanished")
    text += msg("diagnose.run.last_heartbeats", last=last) if last else ""
    return [
        Event(
            UNKNOWN,
            OWN,
            LogLine(1, text, None, text, 0),
            None,
            None,
            text=text,
            file=run.supervisor,
        )
    ]


def of_files(paths: Iterable[Path]) -> Iterable[Event]:
    for path in paths:
        facts = read_json(path)
        if not facts:
            continue
        text, rank, time = _ours(facts) if "guilty_rank" in facts else _torchs(facts, path)
        if text:
            yield _event(text, rank, time, path, facts.get("where") or None)


def _ours(facts: Record) -> tuple[str, int | None, float | None]:
    return (
        f"{facts.get('type')}: {facts.get('message')}",
        facts.get("guilty_rank"),
        facts.get("time"),
    )


def _torchs(facts: Record, path: Path) -> tuple[str, int | None, float | None]:
    """torch/distributed/elastic/multiprocessing/errors/error_handler.py: {"message": {"message",
    "extraInfo": {"timestamp"}}}."""
    message = facts.get("message")
    if isinstance(message, str):
        return message, source.rank_of(str(path)), None
    if not isinstance(message, dict):
        return "", None, None
    more = message.get("extraInfo") or {}
    try:
        time = float(more["timestamp"])
    except (KeyError, TypeError, ValueError):
        time = None
    return str(message.get("message", "")), _rank_of_folder(path), time


def _rank_of_folder(path: Path) -> int | None:
    return int(path.parent.name) if path.parent.name.isdigit() else source.rank_of(str(path))


def _event(text: str, rank: int | None, time: float | None, path: Path, where: str | None) -> Event:
    lines = [
        LogLine(number, one, rank, one, number) for number, one in enumerate(text.splitlines(), 1)
    ]
    first = lines[0].text if lines else ""
    embedded = [t for t in traceback.read(lines) if t.end]
    if embedded and embedded[-1].end:  # raised in a worker that the rank waited for
        first, where = embedded[-1].end.text, embedded[-1].where
    line = LogLine(_line_of(path, text), shown(first), rank, text, 0)
    known = scan.recognised(text)
    if not known or (known[0].role in (CASCADE, EVIDENCE) and embedded):
        cause = RAISED if traceback.EXCEPTION.match(first) else UNKNOWN
        return Event(cause, UNLISTED, line, rank, time, text=text, file=path, place=where)
    role = OWN if known[0].role == ROOT else known[0].role
    return Event(known[0].cause, role, line, rank, time, text=text, file=path, place=where)


def _line_of(path: Path, text: str) -> int:
    first = json.dumps(text.splitlines()[0])[1:-1] if text else ""
    lines = path.read_text(errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, 1) if first and first in line), 1)
