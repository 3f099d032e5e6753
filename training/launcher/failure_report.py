"""Exit code and failure record (failure.json, the failure card) of an outcome."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING

from training.core import cause_ids, exit_status, find_run, heartbeat, rundir
from training.core.errors import RANK_DISK_FULL, Exit
from training.core.messages import msg
from training.core.plain_text import one_line, plain
from training.diagnose import error_reports, full_disk
from training.diagnose import exception_cause as causes
from training.diagnose.advice import MOST, filled, of_end, values
from training.launcher import (
    exhausted_gpu,
    failed_gpus,
    kernel_evidence,
    rank_log,
    seats,
    stop_report,
)
from training.launcher.outcome import Outcome
from training.launcher.stop_report import stopped_early
from training.trainer import prepared_cache
from training.watchdog.hang_report import DESYNC, UNEVEN
from training.watchdog.rank_exit import DIED, ERROR

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from training.core.contracts.kinds import FailureKind
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord, RankErrorRecord
    from training.diagnose.events import Event
    from training.diagnose.root_cause import RootCause
    from training.diagnose.traceback import Traceback
    from training.launcher.kernel_evidence import KernelEvidence
    from training.watchdog.hang_report import HangFinding

SHOWN_CHARACTERS = 240  # of an exception's message
UNCLEAR = {*causes.VAGUE, cause_ids.SEGFAULT, cause_ids.KILLED}
OF_MEMORY = (cause_ids.HOST_OOM_KILLED, cause_ids.SHM_TOO_SMALL)
OF_DEATHS: dict[str, str] = {  # by kind
    DESYNC: cause_ids.COLLECTIVE_TIMEOUT,
    UNEVEN: cause_ids.EXIT_STATUS,
}


def exit_code(outcome: Outcome) -> int:
    """Exit status of the launcher."""
    if outcome.finding is not None:
        return Exit.HANG
    # a rank is guilty only where Duet has ended the command because of it
    failed = outcome.here is not None and outcome.here[0] is not None
    if outcome.watched and outcome.asked == Exit.DONE and outcome.ended and not failed:
        status = outcome.ended[0][1]  # passed on, as a shell shows it
        return status if status >= 0 else 128 - status
    if outcome.torn_down and outcome.here:
        return 128 - outcome.here[1]  # as a shell shows it: the script's work is complete
    if outcome.killed:
        lost = outcome.ours and not outcome.idle and outcome.left is None
        return Exit.TRAINING if lost and outcome.asked == Exit.PREEMPTED else outcome.asked
    if stopped_early(outcome):
        return outcome.asked
    if outcome.guilty:
        # all ranks of a training reject the same input, whichever machine reports it first
        status = ((outcome.elsewhere and outcome.here) or outcome.guilty)[1]
        return (
            Exit(status)
            if outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES)
            else Exit.TRAINING
        )
    if not outcome.ours and outcome.asked != Exit.DONE:
        return outcome.asked
    codes = {status for _, status in outcome.ended}
    for code in (Exit.INTERRUPTED, Exit.PREEMPTED):
        if code in codes:
            # after a request for other ranks they may not have noticed the one to stop
            return outcome.asked if outcome.resized and outcome.asked != Exit.DONE else code
    return Exit.DONE if Exit.DONE in codes else outcome.closed


def failure(outcome: Outcome, run: rundir.RunDir, plan: Plan) -> FailureRecord:
    """Content of failure.json."""
    found = outcome.finding
    errors = error_reports.of_all(run, outcome.unwritten)
    rank, source, status, own = _first_failed(outcome, run, errors)
    gone, places = failed_gpus.lost(outcome, plan, own)
    if blamed := failed_gpus.with_lost(outcome, plan, errors, places, rank, own):
        rank, source, own = blamed[0], *blamed
    log = rank_log.file(outcome, run, source, rank)
    cause, kind, summary = _what(outcome, run, rank, status, own, gone if places else "")
    # the rank that died of a request to stop has not failed
    rank, own = (None, None) if kind == rundir.ASKED else (rank, own)
    logged = rank_log.cause(outcome, log, source, cause, kind, status, own)
    rank = logged.rank if rank is None and logged else rank
    thrown = logged.event.thrown if logged and logged.event else None
    if logged:
        cause, kind, summary = rank_log.explain(outcome, logged, own, cause, kind, summary)
    # a driver that is not kept loaded may need longer
    hasty = not places and failed_gpus.in_a_hurry(outcome, plan, own)
    if gone and kind in (DIED, ERROR) and cause in UNCLEAR and not hasty:
        cause, summary = cause_ids.GPU_HARDWARE, gone  # its driver does not answer
    kernel = kernel_evidence.consult(outcome, run, plan, cause, kind, own)
    ended = rank_log.status(logged, own, status)
    told = kernel.explanation(cause, kind, rank, ended, summary) if kernel else None
    elsewhere = told.rank != rank if told else bool(blamed) and not own
    if told:
        cause, rank, summary = told.cause, told.rank, told.summary
    own, thrown = (None, None) if elsewhere else (own, thrown)
    # the rank may be another one than the source, as of a loss that all ranks have found to be NaN
    log = rank_log.file(outcome, run, rank, None if elsewhere else source)
    lost = (
        outcome.lost
        if kind != rundir.ASKED
        and not told
        and (outcome.here is None or (own and causes.is_victim(own)))
        else None
    )
    if found:
        found = found.blaming(rank)
    timed_out = not found and not told and _timed_out(own, cause, logged)
    seen = outcome.missing if timed_out else found
    if timed_out:  # the rank that reports it is never the guilty one
        rank = seen.rank if seen else None
        if seen and own and rank is None:
            rank = causes.named_as_missing(own)
    if lost:  # the ranks of this machine report only that they have lost the others
        rank, own, cause, kind, summary = None, None, lost.cause, lost.kind, lost.text
        timed_out, seen = False, None
    record: FailureRecord = {
        "cause": cause,
        "kind": kind,
        "victim": timed_out or _lost_another(outcome, cause, None if told else own),
        "rank": rank,
        "step": _step(run, rank),
        "summary": summary,
        "where": seen.where if seen else None if elsewhere else _where(outcome, own, thrown, rank),
        "phase": (found.phase if found else None)
        or (outcome.phases.get(rank) if rank is not None else None),
        "phases": {str(r): p for r, p in sorted(outcome.phases.items())},
        "since_s": found.since_s if found else None,
        "waiting": {str(r): place for r, place in sorted(seen.waiting.items())} if seen else {},
        "stacks": seen.folder if seen else None,
        "status": status,
        "exit_code": int(exit_code(outcome)),
        "evidence": _evidence(outcome, found, log),
        "log": plan.get("log_file") or str(log) if lost or not find_run.exists(log) else str(log),
        "torn_down": outcome.torn_down,
        "launch": plan["launch"],
        "time": time.time(),
    }
    if kernel:
        record["kernel"] = kernel.record()
    event = logged.event if logged else None
    line = event.line.text if event else ""
    _add_parts(record, outcome, own, run, plan, line, told is not None or _killed(ended, own))
    failed_gpus.note(record, outcome, plan, places, own, line)
    if lost:
        record["node"] = lost.node
    else:
        _add_memory(record, own, run, plan if not gone else None)
        error_reports.note_others(record, own, errors)
    return _complete(record, event, kernel, values(run, plan))


def _first_failed(
    outcome: Outcome, run: rundir.RunDir, errors: Sequence[RankErrorRecord]
) -> tuple[int | None, int | None, int, RankErrorRecord | None]:
    """(guilty rank, rank whose log is most informative, status, error report). A rank that has
    reported its exit code is the one that failed, also in `outcome`."""
    found = outcome.finding
    rank, status = (outcome.here if outcome.elsewhere else outcome.guilty) or (None, 0)
    reported = rank is None and errors and not found  # torchrun only fails as well
    if reported:
        rank = min(errors, key=lambda e: e["time"])["rank"]
    own = None if found else causes.root(errors, rank)
    if reported and own and causes.may_follow(own) and rank_log.names_another(outcome, run, own):
        return None, None, status, None
    if own:
        if "exit_code" in own:  # whichever exit was seen first
            status = own["exit_code"]
            outcome.guilty = outcome.here = own["rank"], status
        return own["guilty_rank"], own["rank"], status, own
    together = outcome.death is not None and outcome.death.kind == DESYNC
    return None if together else rank, rank, status, None


def _add_parts(
    record: FailureRecord,
    outcome: Outcome,
    own: RankErrorRecord | None,
    run: rundir.RunDir,
    plan: Plan,
    line: str,
    killed: bool,
) -> None:
    """What only some ends have: a rank that did not stop, a hang that may end, threads of ranks,
    the process of mp.spawn or the data-loader worker that has failed, the folder on a full disk,
    ranks lost before. `line`: of the log, with the error; `killed`: by the kernel, or SIGKILL."""
    if record["kind"] == rundir.ASKED and outcome.stalled:
        stop_report.add_stalled(record, outcome.stalled, run)
    if outcome.finding and (outcome.finding.may_end or outcome.finding.loops):
        record["may_end"] = True
    if "elastic" in plan and plan["elastic"]["lost"]:
        record["lost"] = plan["elastic"]["lost"]
    if outcome.in_threads:
        record["threads"] = {str(r): text for r, text in sorted(outcome.in_threads.items())}
    if own and "process" in own and own["rank"] == record["rank"]:
        record["process"] = own["process"]
        several = len(seats.ranks(plan)) > 1 and not outcome.watched
        if record["cause"] == cause_ids.PORT_IN_USE and several:
            record["spawns"] = True
    if record["cause"] in OF_MEMORY and causes.of_worker(own, line):
        record["worker"] = True
    if record["cause"] == cause_ids.HOST_OOM_KILLED and killed:
        record["oom_kill"] = True
    full_disk.note(record, own, run, known=outcome.ours)


def _complete(
    record: FailureRecord,
    event: Event | None,
    kernel: KernelEvidence | None,
    known: dict[str, str],
) -> FailureRecord:
    """With advice, and without control characters in the program's own words."""
    record["summary"] = plain(record["summary"])
    record["evidence"] = [one_line(line) for line in record["evidence"]]
    groups = event.hit.groups if event and event.hit else {}
    signature = event.signature if event else None
    shown = kernel.line_of(record["cause"]) if kernel else None
    if shown:
        signature, groups = shown.signature, shown.groups
    sentences = of_end(record, signature, groups, known)
    if shown and shown.signature and record["cause"] == cause_ids.HANG:
        sentences = [*filled(shown.signature.advice, shown.groups), *sentences][:MOST]
    return {**record, "advice": sentences}


def _add_memory(
    record: FailureRecord, own: RankErrorRecord | None, run: rundir.RunDir, plan: Plan | None
) -> None:
    """The memory of an exhausted GPU, and the other processes that have exhausted it. `plan`: None
    where the driver does not answer."""
    if own and "memory" in own:
        record["memory"] = own["memory"]
    rank, of_spawn = record["rank"], "process" in record  # mp.spawn's select their own
    if plan is None or record["cause"] != cause_ids.GPU_OOM or rank is None or of_spawn:
        return
    if (place := seats.place_of_gpu(plan, rank)) is None:
        return
    ours = {beat.pid for beat in heartbeat.read_all(run.heartbeats)}
    held = exhausted_gpu.occupants(plan, place, record.get("memory"), ours)
    if held:
        record["occupied"] = held


def of_node(outcome: Outcome, run: rundir.RunDir, plan: Plan) -> FailureRecord:
    """That of one of several machines, for all of them: files on a disk of its own are named as
    host:path."""
    record = failure(outcome, run, plan)
    # with a shared disk the report of another machine's rank is known here, too
    record.setdefault("node", seats.machine_of(plan, record["rank"]))
    if outcome.blocked:
        record["blocked"] = outcome.blocked
    if not plan.get("shared", True):
        host = socket.gethostname()
        record["log"] = f"{host}:{record['log']}"
        record["stacks"] = f"{host}:{record['stacks']}" if record["stacks"] else None
    return record


def _what(
    outcome: Outcome,
    run: rundir.RunDir,
    rank: int | None,
    status: int,
    own: RankErrorRecord | None,
    gone: str,
) -> tuple[str, FailureKind, str]:
    """(cause, kind, summary); `own`: the rank's own error report; `gone`: GPUs that the driver no
    longer lists."""
    if outcome.killed or stopped_early(outcome):
        return (
            cause_ids.INTERRUPTED if outcome.asked == Exit.INTERRUPTED else cause_ids.PREEMPTED,
            rundir.ASKED,
            stop_report.sentence(outcome, run),
        )
    if outcome.torn_down:
        return (
            cause_ids.UNKNOWN,
            DIED,
            msg("launcher.failure.torn_down", how=exit_status.how(status)),
        )
    if outcome.ours and status == Exit.RESOURCES and own and "stopped" in own:
        return (
            cause_ids.DISK_FULL if own["disk_full"] else causes.of_error(own),
            ERROR,
            str(own["stopped"]),
        )
    if outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES):
        return cause_ids.CONFIG_ERROR, ERROR, msg("launcher.failure.rejected")
    # on a common disk its report is read here
    if outcome.elsewhere and outcome.here is None and not own:
        return cause_ids.PEER_DIED, DIED, msg("launcher.failure.elsewhere")
    if found := outcome.finding:
        if gone:
            return cause_ids.GPU_HARDWARE, found.kind, f"{gone}; {found.short()}"
        return cause_ids.HANG, found.kind, found.short()
    if (outcome.ours and status == RANK_DISK_FULL) or (own and own["disk_full"]):
        return cause_ids.DISK_FULL, ERROR, _full_disk(outcome, run, own)
    if gone:
        return cause_ids.GPU_HARDWARE, ERROR if own else DIED, gone
    if _killed(status, own) and (kills := kernel_evidence.kills_for_memory(outcome)):
        return cause_ids.HOST_OOM_KILLED, DIED, kills
    if own and own["type"] != causes.LEFT:
        return causes.of_error(own), ERROR, error_reports.headline(own, SHOWN_CHARACTERS)
    if outcome.ours and -status == signal.SIGBUS and (changed := prepared_cache.changed(run)):
        return (
            cause_ids.UNKNOWN,
            DIED,
            msg("launcher.failure.sigbus", changed=changed),
        )
    if (death := outcome.death) and death.kind != DIED:
        return OF_DEATHS.get(death.kind, cause_ids.UNKNOWN), death.kind, death.how
    if own:
        known = causes.of_error(own)
        known = cause_ids.EXIT_STATUS if known == cause_ids.UNKNOWN else known
        return known, DIED, causes.left(own)
    torchrun = rank is None and status >= 0  # it reports only that something failed
    cause = cause_ids.UNKNOWN if torchrun else causes.of_status(status)
    return cause, DIED, exit_status.how(status)


def _full_disk(outcome: Outcome, run: rundir.RunDir, own: RankErrorRecord | None) -> str:
    """Duet's own trainings write to their run directory, if they name no other disk."""
    if own and (not outcome.ours or full_disk.elsewhere(own, run)):
        return error_reports.headline(own, SHOWN_CHARACTERS)
    return msg("launcher.failure.disk_full", path=run.path)


def _killed(status: int, own: RankErrorRecord | None) -> bool:
    """By SIGKILL: the rank, its process of mp.spawn, or the program in a shell script."""
    if own and own["type"] != causes.LEFT:
        return own["type"] == causes.EXITED and own["message"].endswith(" SIGKILL")
    return -status == signal.SIGKILL or (not own and status == 128 + signal.SIGKILL)


def _where(
    outcome: Outcome, own: RankErrorRecord | None, thrown: Traceback | None, rank: int | None
) -> str | None:
    """`thrown`: in the log, which may be that of a rank that waited for the guilty one. A report
    with a traceback lacks its place only if that explains nothing; sys.exit may be far from the
    exception that the script has printed."""
    own_place = str(own["where"]) if own else outcome.death.where if outcome.death else None
    left = own is not None and own["type"] == causes.LEFT
    usable = own is None or (own["rank"] == rank and (left or not own.get("traceback")))
    logged = thrown.where if thrown and usable else None
    return (logged or own_place or None) if left else (own_place or logged)


def _evidence(outcome: Outcome, found: HangFinding | None, log: Path) -> list[str]:
    """A rank that has ended has no stack."""
    if found and (found.rank is None or found.rank in found.stacks):
        return found.evidence()
    return rank_log.last_lines(log, outcome.log_from.get(log, 0))


def _lost_another(outcome: Outcome, cause: str, own: RankErrorRecord | None) -> bool:
    """Has the rank only lost another one? That its error was raised from such a loss proves it
    only where another machine has reported a failed rank."""
    if own is None:
        return cause == cause_ids.PEER_DIED
    return causes.lost_peer(own) if outcome.elsewhere else causes.is_victim(own)


def _timed_out(own: RankErrorRecord | None, cause: str, logged: RootCause | None) -> bool:
    """Was the rank ended by torch's timeout of a collective?"""
    if own:
        return causes.timed_out(own)
    return cause == cause_ids.COLLECTIVE_TIMEOUT and causes.timed_out_by_log(logged)


def _step(run: rundir.RunDir, rank: int | None) -> int:
    """The step that this rank (without one: the furthest rank) had begun; 0 before the first."""
    beats = heartbeat.read_all(run.heartbeats)
    return max(
        (b.step for b in beats if b.rank == rank), default=max((b.step for b in beats), default=0)
    )
