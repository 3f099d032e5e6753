"""How a start of the ranks ends: what is written, logged and returned."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

from training.config import fault_spec
from training.core import exit_status, heartbeat, run_reader, rundir, standing
from training.core import log as console
from training.core.check_names import check_title
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.tail import tail
from training.core.units import plural
from training.diagnose import card
from training.host import cgroups, placement
from training.launcher import (
    failure_report,
    fewer_ranks,
    local_ranks,
    script_figures,
    stop_report,
)
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.plan import cli_args, writer
from training.trainer import summary

if TYPE_CHECKING:
    from training.core.contracts.kinds import SummaryStatus
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ScriptSummary
    from training.core.contracts.verdict import FailureRecord
    from training.diagnose.log_parsers.log_metrics import LogMetrics


def folder_lost(run: rundir.RunDir, plan: Plan, outcome: Outcome) -> bool:
    """Was the run directory removed while Duet's ranks ran? Reported without its files, which
    cannot be written or read."""
    if not outcome.ours or not (outcome.gone or run.is_gone()):
        return False
    what = msg("launcher.end.folder_lost", folder=run.own)
    fixes = [
        cli_args.command(plan["command"]["script"], plan["command"]["args"])
        + msg("launcher.end.from_the_beginning")
    ]
    console.report(
        UserError(Problem("run.folder_lost", what, "", fixes), Exit.TRAINING),
        closing=msg("launcher.end.nothing_saved"),
    )
    return True


def may_help(run: rundir.RunDir, outcome: Outcome, record: FailureRecord) -> bool:
    """Is it a failure that a restart could fix? Recorded as an event."""
    if outcome.torn_down or record["kind"] == rundir.ASKED:
        return False
    if outcome.ours and record["exit_code"] in (Exit.CONFIG, Exit.RESOURCES):
        return False
    run.event("failure", cause=record["cause"], rank=record["rank"], text=record["summary"])
    return True


def report_end(
    run: rundir.RunDir,
    plan: Plan,
    outcome: Outcome,
    record: FailureRecord,
    given_up: str,
    *,
    analyse: bool = False,
) -> None:
    """Log the end of a run that failed or was stopped. `given_up`: the reason for no restart, where
    restarts were requested."""
    code, lost = record["exit_code"], fewer_ranks.at_end(plan)
    if outcome.torn_down:
        how = exit_status.how(record["status"])
        console.warning(msg("launcher.end.torn_down", how=how, code=code, card=card.of_run(record)))
        return
    if record["kind"] == rundir.ASKED:
        console.warning(msg("launcher.end.exit", text=record["summary"] + lost, code=code))
        return
    if outcome.ours and code in (Exit.CONFIG, Exit.RESOURCES):
        # rank 0 reports its own, and on several machines also that which another rank has reported
        spoken = (0, code) in outcome.ended and not placement.on_one_machine(plan["place"])
        rejected = () if spoken else record.get("rejected", ())
        if problems := [Problem(one["code"], one["text"]) for one in rejected]:
            console.report(UserError(problems, Exit(code)), msg("launcher.end.ended"))
        return
    console.error(
        msg("launcher.end.failed_given_up", given_up=given_up + lost, card=card.of_run(record))
        if given_up
        else msg("launcher.end.failed", lost=lost, card=card.of_run(record))
    )
    if analyse:
        console.info(msg("launcher.end.analysis", analysis=analysis(run)))


def keep_failure(run: rundir.RunDir, record: FailureRecord, plan: Plan) -> None:
    """Write failure.json, unless the ranks have refused a resume before its first step."""
    refused = record["exit_code"] in (Exit.CONFIG, Exit.RESOURCES)
    if refused and _started_before(run) and unbegun(run, plan):
        console.warning(msg("launcher.end.resume_refused", name=run.name))
        return
    script_figures.add(record, run, plan)
    rundir.keep_json(run.failure, record)
    if run.own == run.path:
        run.forget_before(plan, run.failure)


def _started_before(run: rundir.RunDir) -> bool:
    """The first start of a SLURM job resumes a run, too."""
    return "device" in (rundir.read_json(run.plan_before) or {})


def unbegun(run: rundir.RunDir, plan: Plan) -> bool:
    """Was this a resume that ended before its first step? Then the run is restored as it was."""
    return (
        plan["resume"]
        and not standing.has_stepped(run, plan, plan["created"])
        and writer.give_back(run)
    )


def node_end(run: rundir.RunDir, code: int, outcome: Outcome) -> int:
    text = msg("launcher.end.node", ranks=run.ranks)
    how = "" if outcome.ours else stop_report.statuses(outcome)
    console.success(text) if code == Exit.DONE else console.warning(
        msg("launcher.end.node_stopped", how=how, code=int(code), text=text)
    )
    return code


def regular_end(
    run: rundir.RunDir, plan: Plan, ending: PostRun, outcome: Outcome, recovery: Recovery
) -> int:
    code = failure_report.exit_code(outcome)
    if local_ranks.is_script(plan):
        return _script_end(run, plan, code, outcome, recovery, ending.seconds)
    recovered = recovery.finish()
    for text in missed_faults(run, plan):
        console.warning(text)
    ending.report_unless_preempted(code)
    text = summary.render(run, plan)
    if code == Exit.DONE:
        console.success(msg("launcher.end.finished", recovered=recovered, text=text).rstrip())
    else:
        why = (
            msg("launcher.end.interrupted", recovered=recovered)
            if code == Exit.INTERRUPTED
            else msg("launcher.end.stopped", recovered=recovered)
        )
        console.warning(f"{msg('launcher.end.exit', text=why, code=int(code))}\n{text}".rstrip())
    return code


def missed_faults(run: rundir.RunDir, plan: Plan) -> list[str]:
    """The warnings of ranks of which the console shows nothing."""
    if not plan["config"].get("inject"):
        return []
    return [
        event["text"]
        for event in run_reader.read_events(run.events)
        if event["event"] == "warning"
        and event["code"] == fault_spec.MISSED
        and event.get("rank")
        and event["time"] >= plan["created"]
    ]


def _script_end(
    run: rundir.RunDir,
    plan: Plan,
    code: int,
    outcome: Outcome,
    recovery: Recovery,
    seconds: float,
) -> int:
    ranks = plural(plan["ranks"], "rank")
    status: SummaryStatus = "finished" if code == Exit.DONE else "stopped"
    printed = script_figures.printed(run)
    if not run.is_gone():
        done: ScriptSummary = {
            "status": status,
            "ranks": (outcome.watched and local_ranks.found(run)) or plan["ranks"],
            "launch": plan["launch"],
            "time": time.time(),
            "seconds": seconds,
            "exit_code": int(code),
        }
        if printed is not None:
            done["figures"] = script_figures.final(printed)
        rundir.keep_json(run.summary, done)
    recovered = recovery.finish()
    if printed is not None:
        _warn_of_loss(run, printed)
    if code == Exit.DONE and outcome.watched:
        console.success(
            msg(
                "launcher.end.watched",
                command=outcome.watched,
                seconds=seconds,
                recovered=recovered,
                output=_output(run),
            )
        )
    elif code == Exit.DONE:
        console.success(
            msg(
                "launcher.end.script",
                ranks=ranks,
                seconds=seconds,
                recovered=recovered,
                output=_output(run),
            )
        )
    else:
        who = (
            msg("launcher.end.on_request")
            if outcome.asked != Exit.DONE
            else msg("launcher.end.by_itself")
        )
        console.warning(
            msg(
                "launcher.end.script_stopped",
                who=who,
                recovered=recovered,
                statuses=stop_report.statuses(outcome),
                code=int(code),
                output=_output(run),
            )
        )
    return code


def _output(run: rundir.RunDir) -> str:
    if run.is_gone():
        return msg("launcher.end.output_gone", folder=run.own)
    return msg("launcher.end.output", folder=run.ranks)


def _warn_of_loss(run: rundir.RunDir, printed: LogMetrics) -> None:
    """Its status alone would call a training on NaN a success."""
    if (found := printed.not_finite()) is None:
        return
    loss, step = found
    text = (
        msg("launcher.end.loss_not_finite", loss=loss)
        if step is None
        else msg("launcher.end.loss_not_finite_since", loss=loss, step=step)
    )
    console.warning(text)
    run.event("warning", code="warning.loss_not_finite", text=text, by="supervisor")


def analysis(run: rundir.RunDir) -> str:
    """Last phase and output of every rank, and the state of the machine (enhanced script)."""
    lines = []
    for beat in heartbeat.read_all(run.heartbeats):
        silent = time.time() - beat.wall_time
        lines.append(
            msg(
                "launcher.analysis.rank", rank=beat.rank, beat=beat, epoch=beat.epoch, silent=silent
            )
        )
        lines += [f"      │ {line[:140]}" for line in tail(run.rank_log(beat.rank), 4)]
    memory, disk = cgroups.tightest_memory(), shutil.disk_usage(run.path)
    lines.append(
        msg(
            "launcher.analysis.machine",
            memory=100 * memory.used / memory.limit,
            disk=100 * disk.used / disk.total,
            load=os.getloadavg()[0],
        )
    )
    for check in (run_reader.read_preflight(run.preflight) or {"checks": []})["checks"]:
        if check["status"] != "ok":
            lines.append(
                msg("launcher.analysis.check", name=check_title(check["name"]), text=check["text"])
            )
    return "\n".join(lines)
