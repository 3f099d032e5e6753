"""Status of a run (starting, running, finished, …) and its reason, from its files and processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from training.core import rundir
from training.core.errors import UserError
from training.core.jsonl import Record, dig, mtime, number, text, whole
from training.core.messages import msg
from training.core.next_command import next_command
from training.core.run_reader import as_plan
from training.core.standing import ELSEWHERE_S, is_copy, other_host, quiet_s, runs_here
from training.core.units import duration, plural
from training.monitor import slurm_job

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import RankState

STARTING: Final = "starting"
RUNNING: Final = "running"
FINISHED: Final = "finished"
STOPPED: Final = "stopped"
FAILED: Final = "failed"
DIED: Final = "died"
ENDED = (FINISHED, STOPPED, FAILED, DIED)
STARTING_S = 60.0  # a starting run without a process gets a reason after this time


@dataclass(frozen=True)
class RunEvidence:
    """What the status follows from: records as read from their files.

    `since`: start of the last attempt, unix s. `last`: newest record of metrics.jsonl. `summary`
    and `failure`: those of the last attempt. `alive`: the supervisor or a process that it lists
    runs on this machine. `resumable`: there is a checkpoint. `printed`: a user script has printed
    figures.
    """

    run: rundir.RunDir
    plan: Record | None
    supervisor: Record
    ranks: list[RankState]
    since: float
    last: Record
    summary: Record | None
    failure: Record | None
    alive: bool
    resumable: bool
    printed: bool


def state_word(state: RunStatus) -> str:
    """The state as it is shown."""
    match state:
        case "starting":
            return msg("monitor.state.starting")
        case "running":
            return msg("monitor.state.running")
        case "finished":
            return msg("monitor.state.finished")
        case "stopped":
            return msg("monitor.state.stopped")
        case "failed":
            return msg("monitor.state.failed")
        case "died":
            return msg("monitor.state.died")
        case "silent":
            return msg("monitor.state.silent")


def judge(seen: RunEvidence) -> tuple[RunStatus, str | None]:
    """The status, and a reason where the status alone does not explain it."""
    run, plan, summary, failure = seen.run, seen.plan, seen.summary, seen.failure
    if failure and (not summary or (mtime(run.failure) or 0) >= (mtime(run.summary) or 0)):
        if failure.get("torn_down"):  # its work was complete
            return FINISHED, text(failure.get("summary"))
        if failure.get("kind") == rundir.ASKED:
            return STOPPED, text(failure.get("summary"))
        cause = text(failure.get("cause")) or msg("monitor.reason.unknown_cause")
        what = text(failure.get("summary")) or msg("monitor.reason.no_summary")
        return (
            FAILED,
            msg("monitor.reason.failed", cause=cause, summary=what)
            if (rank := whole(failure.get("rank"))) is None
            else msg("monitor.reason.rank_failed", cause=cause, rank=rank, summary=what),
        )
    if summary:
        stopped = text(summary.get("status")) == STOPPED
        if not stopped:
            return FINISHED, None
        return STOPPED, msg("monitor.reason.on_request", resume=_resume_hint(seen))
    if not run.path.is_dir():
        return DIED, msg("monitor.reason.directory_gone")
    stepped = (number(seen.last.get("time")) or -1.0) >= seen.since
    # A script has no heartbeat: it runs when its process exists, or is listed elsewhere.
    begun = (
        stepped
        or seen.printed
        or any(
            r["pid"] and r["alive"] is not False if script_of(plan) else r["step"]
            for r in seen.ranks
        )
    )
    active: RunStatus = RUNNING if begun else STARTING
    if seen.alive or any(r["alive"] for r in seen.ranks):
        return active, None if plan else msg("monitor.reason.no_plan")
    started = bool(seen.supervisor) or any(r["pid"] for r in seen.ranks)
    host = None if run.is_archived else other_host(plan, seen.supervisor)
    if host and (started or stepped):
        quiet = quiet_s(run)
        asks = slurm_job.QUIET_S < quiet < ELSEWHERE_S  # there may be thousands of older runs
        if asks and (ended := slurm_job.end_of(run, plan)):
            return DIED, ended + (_resume_hint(seen) if seen.resumable else "")
        return (
            (active, msg("monitor.reason.elsewhere", host=host))
            if quiet < ELSEWHERE_S
            else (DIED, msg("monitor.reason.silent_elsewhere", host=host, time=duration(quiet)))
        )
    if not host and is_copy(run, plan):
        again = _resume_hint(seen) if seen.resumable else ""
        return DIED, msg("monitor.reason.copied", folder=dig(plan, "run_dir"), resume=again)
    if started:
        again = _resume_hint(seen) if seen.resumable else ""
        return (
            DIED,
            msg("monitor.reason.all_gone", pid=seen.supervisor.get("pid"), resume=again)
            if seen.supervisor
            else msg("monitor.reason.ranks_gone", resume=again),
        )
    if plan is None or stepped or run.is_archived:
        return (
            DIED,
            msg("monitor.reason.no_process") if plan else msg("monitor.reason.no_process_no_plan"),
        )
    starter = dig(plan, "starter")
    if isinstance(starter, dict) and not runs_here(starter, seen.since):
        return DIED, msg("monitor.reason.never_started")
    # A job in a queue, a start on another machine, or rank 0 of another launcher, which prepares a
    # large corpus for hours before its first heartbeat: silence proves nothing.
    return (
        STARTING,
        msg("monitor.reason.no_rank_yet") if time.time() - seen.since > STARTING_S else None,
    )


def _resume_hint(seen: RunEvidence) -> str:
    """ "; to resume: COMMAND"; empty for a user script, which saves its own state."""
    try:
        return (
            msg(
                "monitor.reason.to_resume",
                command=next_command(as_plan(seen.plan, seen.run.plan), seen.run),
            )
            if seen.plan and script_of(seen.plan) is None
            else ""
        )
    except (KeyError, TypeError, AttributeError, UserError):
        # an incomplete plan, or one of a later version
        return ""


def ended_at(state: RunStatus, seen: RunEvidence, end: Record | None) -> float | None:
    """When an ended run ended, unix s; for a run that died, its last recorded activity or,
    without any, its start. `end`: its summary or failure, of which the file may be a copy with a
    later mtime."""
    run = seen.run
    if state != DIED:
        of_failure = state == FAILED or not run.summary.exists()
        return number(dig(end, "time")) or mtime(run.failure if of_failure else run.summary)
    activity = [
        seen.since,
        number(seen.last.get("time")),
        mtime(run.supervisor),
        *(r["beat_unix_s"] for r in seen.ranks),
    ]
    return max((s for s in activity if s), default=None)


def script_of(plan: Mapping[str, object] | None) -> str | None:
    """Path of the user script that the run launched; None for a built-in or custom task."""
    return text(dig(plan, "script", "path"))


def ranks_of(count: int, planned: int | None) -> str:
    """The number of ranks, and of how many if the run has lost some."""
    text = plural(count, "rank")
    return msg("monitor.screen.ranks_of", ranks=text, planned=planned) if planned else text
