"""End of a failed rank without a supervisor (python train.py, torchrun, ranks of a platform):
failure.json and the failure card, once for all ranks that share the run directory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from training.core import file_lock, heartbeat, log, manifest, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.diagnose import error_reports
from training.launcher import end_record, endings, failure_report, stop_signals
from training.launcher.outcome import Outcome
from training.plan import writer

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord


def report(
    run: rundir.RunDir, plan: Plan, rank: int, status: int, since: int
) -> tuple[int, FailureRecord | None]:
    """The exit code of a rank that has recorded its error, and failure.json if this rank has
    written it. `status`: that of error_file.record, or the code of a UserError, which has been
    reported; `since`: where the report begins in the rank's log."""
    outcome = _outcome(run, rank, status, since)
    code = int(failure_report.exit_code(outcome))
    with _alone(run):
        if not _is_first(run, plan):
            if code == Exit.TRAINING:
                log.error(_too(run, plan, rank, code))
            return code, None
        record = failure_report.failure(outcome, run, plan)
        endings.keep_failure(run, record, plan)
        if rank != 0:
            # without a disk in common the log is on the machine of rank 0
            with contextlib.suppress(OSError):
                log.open_log(plan["log_file"])
        if endings.may_help(run, outcome, record):
            endings.report_end(run, plan, outcome, record, "")
    return int(record["exit_code"]), record


def stopped(run: rundir.RunDir, plan: Plan, asked: KeyboardInterrupt) -> int:
    """The exit code after a stop signal before the training began, which the first rank reports. A
    resumed run is restored as it was."""
    code = stop_signals.code(stop_signals.number_of(asked))
    with _alone(run):
        if not _is_first(run, plan):
            return int(code)
        if plan["resume"] and writer.give_back(run):
            log.warning(msg("launcher.end.before_first_step", name=run.name, code=int(code)))
            return int(code)
        text = msg("launcher.failure.before_begin")
        end_record.write(run, plan, code, manifest.newest_step(run.checkpoints), text)
        log.warning(msg("launcher.end.exit", text=text, code=int(code)))
    return int(code)


def _alone(run: rundir.RunDir) -> contextlib.AbstractContextManager[None]:
    """While entered, the other failing ranks wait: the first one writes the failure."""
    return contextlib.nullcontext() if run.is_gone() else file_lock.held(run.path)


def _outcome(run: rundir.RunDir, rank: int, status: int, since: int) -> Outcome:
    failed = rank, status
    errors = {error["rank"]: error["phase"] for error in error_reports.of_all(run)}
    phases = {
        beat.rank: errors.get(beat.rank) or str(beat) for beat in heartbeat.read_all(run.heartbeats)
    }
    return Outcome(
        ended=[failed],
        guilty=failed,
        here=failed,
        phases=phases,
        log_from={run.rank_log(rank): since},
    )


def _is_first(run: rundir.RunDir, plan: Plan) -> bool:
    """Whether no rank has written the failure of this start, which has not been withdrawn (then the
    plan of the start before is back)."""
    current = rundir.read_json(run.plan) or {}
    written = rundir.read_json(run.failure) or {}
    return current.get("launch") == plan["launch"] and not rundir.is_of_start(
        written, plan, run.failure, plan["created"]
    )


def _too(run: rundir.RunDir, plan: Plan, rank: int, code: int) -> str:
    error = error_reports.of_rank(run, rank)
    how = error_reports.headline(error, failure_report.SHOWN_CHARACTERS) if error else ""
    written = rundir.read_json(run.failure) or {}
    if rundir.is_of_start(written, plan, run.failure, plan["created"]):
        return msg("launcher.end.failed_too", rank=rank, how=how, file=run.failure, code=code)
    return msg("launcher.end.rank_failed", rank=rank, how=how, code=code)
