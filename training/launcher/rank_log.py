"""The log of a failed rank: its last lines, and the cause of the end that is found in it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import cause_ids, find_run, rundir
from training.core.messages import msg
from training.core.tail import tail
from training.diagnose import exception_cause as causes
from training.diagnose import signatures
from training.diagnose.log_line import shown
from training.host.process import STOP_SIGNALS
from training.launcher import kernel_evidence
from training.launcher.outcome import Outcome
from training.launcher.symptoms import SymptomLines
from training.watchdog.probes import stacks
from training.watchdog.rank_exit import DIED, ERROR

if TYPE_CHECKING:
    from training.core.contracts.kinds import FailureKind
    from training.core.contracts.verdict import RankErrorRecord
    from training.diagnose.root_cause import RootCause

SHOWN_LINES, READ_LINES = 10, 200
KEPT_CHARACTERS = 2000  # of a line
# Python 3.11 marks the column below each line of a traceback; torch may add the rank
UNDERLINE = re.compile(r"(?:\[rank\d+\]:)?[\s^~]+")


def file(outcome: Outcome, run: rundir.RunDir, *ranks: int | None) -> Path:
    """The log of the first of these ranks that has one, else of all ranks."""
    of_all = run.launcher_log(outcome.watched or "torchrun")
    if of_all in outcome.log_from:
        return of_all  # a rank's own log is from a start without torchrun
    own = (run.rank_log(rank) for rank in ranks if rank is not None)
    # ranks that the only rank has started itself print to its log
    rest = next(iter(outcome.log_from)) if len(outcome.log_from) == 1 else of_all
    return next((file for file in own if find_run.exists(file)), rest)


def last_lines(log: Path, since: int) -> list[str]:
    """Last lines of the rank's output, without those of Python's resource tracker, of Duet's
    program that runs a script, and of the stacks that follow torch's errors of collectives."""
    errors = SymptomLines(inside=True)  # the error may be above the lines that are read
    read = (line for line in tail(log, READ_LINES, since) if not errors.of_stack(line.encode()))
    lines = (line for line in read if not UNDERLINE.fullmatch(line))
    kept = [one for one in lines if "resource_tracker" not in one and not stacks.in_launcher(one)]
    kept = kept[-SHOWN_LINES:]
    return [f"{one[:KEPT_CHARACTERS]}…" if len(one) > KEPT_CHARACTERS else one for one in kept]


def cause(
    outcome: Outcome,
    log: Path,
    source: int | None,
    known: str,
    kind: FailureKind,
    status: int,
    own: RankErrorRecord | None,
) -> RootCause | None:
    """The cause by its log, if the rank has ended by itself and its status, `known` and its own
    report are not enough."""
    by_itself = (
        kind in (DIED, ERROR)
        and not outcome.torn_down
        and -status not in (signal.SIGKILL, *STOP_SIGNALS)
    )
    weak = known not in causes.VAGUE and own is not None and causes.is_weak(own)
    if not ((known in causes.VAGUE or weak) and by_itself and status):
        return None
    if own and causes.damaged_data(own):
        return None  # its traceback in the log is the same
    logged = causes.of_log(log, source, outcome.log_from.get(log, 0))
    if weak and not (
        logged
        and logged.event
        # a thread that could not start: often without consequences, but not beside a weak error
        and (logged.event.role == signatures.ROOT or logged.cause == cause_ids.TOO_MANY_PROCESSES)
    ):
        return None
    if logged and logged.cause == cause_ids.PEER_DIED and own and "process" in own:
        return None  # torch's lines about that process
    return logged


def names_another(outcome: Outcome, run: rundir.RunDir, victim: RankErrorRecord) -> bool:
    """Does torchrun's log name the failure of another rank than this one, which only lost it?"""
    log = file(outcome, run)
    logged = causes.of_log(log, None, outcome.log_from.get(log, 0))
    if logged is None or logged.rank in (None, victim["rank"]):
        return False
    return logged.cause != cause_ids.PEER_DIED and not causes.timed_out_by_log(logged)


def status(logged: RootCause | None, own: RankErrorRecord | None, known: int) -> int:
    """That of the rank; torchrun's own is only 1."""
    if own or logged is None or logged.status is None or not causes.end_of(logged):
        return known
    return logged.status


def explain(
    outcome: Outcome,
    logged: RootCause,
    own: RankErrorRecord | None,
    known: str,
    kind: FailureKind,
    summary: str,
) -> tuple[str, FailureKind, str]:
    """(cause, kind, summary) of a rank, by its log; `summary`: by its own report, if that explains
    the failure."""
    event = logged.event
    if event is None or (own and own["type"] != causes.LEFT):
        vague = logged.cause in (cause_ids.UNKNOWN, cause_ids.RAISED, cause_ids.PEER_DIED)
        return known if vague or causes.end_of(logged) else logged.cause, kind, summary
    line = shown(event.line.text.strip())
    if end := causes.end_of(logged):
        killed = -(logged.status or 0) == signal.SIGKILL
        if killed and (kills := kernel_evidence.kills_for_memory(outcome)):
            return cause_ids.HOST_OOM_KILLED, kind, kills
        return logged.cause, kind, end
    if logged.cause not in (cause_ids.UNKNOWN, cause_ids.RAISED):
        if kind == DIED:
            summary = msg("launcher.failure.logged_before", summary=summary, line=line)
        return logged.cause, kind, summary
    if event.thrown and event.thrown.native:
        summary = msg("launcher.failure.logged_before", summary=summary, line=line)
        return cause_ids.RAISED, kind, summary
    # a program that does not report exceptions to Duet: a traceback at the end of its log
    return (logged.cause, ERROR, line) if event.thrown else (known, kind, summary)
