"""Supervisor of one machine: prepares the data, starts the ranks, watches and reaps them, reports
the result.

The launch scripts exec it, so its exit status is theirs. It imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from training import tasks
from training.core import heartbeat, messages, run_reader, rundir, standing
from training.core import log as console
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.tail import tail
from training.core.units import plural
from training.diagnose import card
from training.host.torch_build import NO_LIBUV
from training.launcher import failure_report, local_ranks, rendezvous
from training.launcher.attempt import Attempt
from training.launcher.outcome import Outcome
from training.launcher.peer_link import PeerLink
from training.launcher.post_run import PostRun
from training.launcher.reaper import Guardian
from training.launcher.recovery import Recovery
from training.launcher.stop_signals import StopSignals
from training.plan import cli_args, writer
from training.plan import training_plan as planner
from training.trainer import prepared_cache, summary

if TYPE_CHECKING:
    from training.core.contracts.kinds import SummaryStatus
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ScriptSummary
    from training.core.contracts.verdict import FailureRecord

SEARCHED_LINES = 200  # at the end of each rank's log


def main(argv: list[str]) -> int:
    node = next(
        (int(word.removeprefix("--node=")) for word in argv if word.startswith("--node=")), 0
    )
    messages.load_all()
    run, stages = rundir.RunDir(argv[0], node), set(argv[1:])
    plan = run_reader.read_plan(run.own_plan)
    if plan is None:
        console.error(msg("core.manifest.damaged", file=run.own_plan))
        return Exit.CONFIG
    # A closed terminal does not end the training; a handler is not inherited by the ranks.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    os.environ["DUET_SUPERVISED"] = "1"
    console.open_log(plan["log_file"])
    planner.announce(plan)
    rundir.write_json(
        run.supervisor,
        {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time(), "ranks": []},
    )
    ending = PostRun(run, plan)
    code, why = _run(run, plan, stages, ending)
    if run.own == run.path:
        ending.close(code, why)
    return code


def _run(run: rundir.RunDir, plan: Plan, stages: set[str], ending: PostRun) -> tuple[int, str]:
    """(exit status, the text shown to the user where no rank has ended the run)."""
    try:
        with _line(run, plan) if plan["place"]["nnodes"] > 1 else nullcontext() as line:
            _prepare(run, plan, line)
            ending.begun = True
            with Guardian() as token:
                return (
                    _together(run, plan, ending, line, token)
                    if line
                    else _attempts(run, plan, ending, stages, token)
                ), ""
    except UserError as error:
        console.report(error, msg("launcher.end.ended") if ending.begun else "")
        return error.code, str(error)
    except KeyboardInterrupt:
        text = msg("launcher.end.interrupted_before")
        if not ending.begun and run.own.exists():
            writer.withdraw(run)
            text = (
                msg("launcher.end.interrupted_unchanged", name=run.name)
                if plan["resume"]
                else msg("launcher.end.interrupted_removed", path=run.path)
            )
        console.warning(msg("launcher.end.exit", text=text, code=int(Exit.INTERRUPTED)))
        return Exit.INTERRUPTED, text


def _line(run: rundir.RunDir, plan: Plan) -> PeerLink:
    try:
        return rendezvous.line_of(plan)
    except UserError:
        writer.withdraw(run)
        raise


def _prepare(run: rundir.RunDir, plan: Plan, line: PeerLink | None) -> None:
    """Rendezvous and data. On a UserError the run directory is withdrawn."""
    try:
        if line:
            line.gather(plan["config"]["rendezvous_timeout"])
        if not local_ranks.is_script(plan) and tasks.spec_of(plan).reads_text:
            prepared_cache.prepare(run, plan)
    except UserError:
        writer.withdraw(run)
        raise


def _together(run: rundir.RunDir, plan: Plan, ending: PostRun, line: PeerLink, token: str) -> int:
    """A run on several machines. When a rank fails anywhere, every machine stops, and node 0
    decides what to do next."""
    recovery, first = Recovery(run, plan), run.own == run.path
    while True:
        attempt = Attempt(run, plan, line.go(), token, line)
        if first:
            attempt.each_pass = recovery.look
        outcome = attempt.go()
        if _folder_lost(run, plan, outcome):
            return Exit.TRAINING
        code = failure_report.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            return (
                _regular_end(run, plan, ending, outcome, recovery)
                if first
                else _node_end(run, code, outcome)
            )
        own: FailureRecord = {
            "node": plan["place"]["node_rank"],
            **failure_report.failure(outcome, run, plan),
        }
        record = line.settle(own)
        _keep_failure(run, record, plan["created"])
        chosen = (
            recovery.choose(record, outcome, line.missing())
            if first and _may_help(run, outcome, record)
            else None
        )
        order = line.decide(
            {"changes": chosen.changes, "why": chosen.why} if chosen else None,
            int(recovery.stopped or 0),
        )
        if order is None:
            if stopped := recovery.stopped or line.stopped:
                return int(stopped)
            _report_end(run, outcome, record, recovery.given_up)
            return int(record["exit_code"])
        if chosen:
            recovery.begin(chosen)
        else:
            recovery.follow(order, record)
        if prepared_cache.changed(run):
            prepared_cache.prepare(run, plan)


def _attempts(run: rundir.RunDir, plan: Plan, ending: PostRun, stages: set[str], token: str) -> int:
    with StopSignals() as signals:
        recovery = Recovery(run, plan, signals)
        while True:
            attempt = Attempt(run, plan, local_ranks.alone(plan), token, signals=signals)
            attempt.each_pass = recovery.look
            outcome = attempt.go()
            if _folder_lost(run, plan, outcome):
                return Exit.TRAINING
            code = failure_report.exit_code(outcome)
            if not outcome.guilty and not outcome.killed:
                return _regular_end(run, plan, ending, outcome, recovery)
            if not outcome.blocked and _lacks_libuv(run, plan, outcome):
                continue
            # Whatever its ranks exited with: while starting they may exit with any status on a stop
            # signal.
            if outcome.asked != Exit.DONE and _unbegun(run, plan):
                ending.begun = False
                console.warning(
                    msg("launcher.end.before_first_step", name=run.name, code=int(outcome.asked))
                )
                return int(outcome.asked)
            record = failure_report.failure(outcome, run, plan)
            _keep_failure(run, record, plan["created"])
            if not _may_help(run, outcome, record) or not recovery.again(record, outcome):
                if recovery.stopped:
                    return int(recovery.stopped)
                _report_end(run, outcome, record, recovery.given_up, analyse="--analyse" in stages)
                return int(code)
            if prepared_cache.changed(run):
                signals.unless_asked(lambda: prepared_cache.prepare(run, plan))
            if recovery.asked_to_stop():
                return int(recovery.stopped or code)


def _folder_lost(run: rundir.RunDir, plan: Plan, outcome: Outcome) -> bool:
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


def _unbegun(run: rundir.RunDir, plan: Plan) -> bool:
    """Was this a resume that ended before its first step? Then the run is restored as it was."""
    return (
        plan["resume"]
        and not standing.stepped_since(run, plan["created"])
        and writer.give_back(run)
    )


def _may_help(run: rundir.RunDir, outcome: Outcome, record: FailureRecord) -> bool:
    """Is it a failure that a restart could fix? Recorded as an event."""
    if outcome.torn_down or record["kind"] == rundir.ASKED:
        return False
    if outcome.ours and record["exit_code"] in (Exit.CONFIG, Exit.RESOURCES):
        return False
    run.event("failure", cause=record["cause"], rank=record["rank"], text=record["summary"])
    return True


def _report_end(
    run: rundir.RunDir,
    outcome: Outcome,
    record: FailureRecord,
    given_up: str,
    *,
    analyse: bool = False,
) -> None:
    """Log the end of a run that failed or was stopped. `given_up`: the reason for no restart, where
    restarts were requested."""
    code = record["exit_code"]
    if outcome.torn_down:
        console.warning(msg("launcher.end.torn_down", code=code, card=card.of_run(record)))
        return
    if record["kind"] == rundir.ASKED:
        console.warning(msg("launcher.end.exit", text=record["summary"], code=code))
        return
    if outcome.ours and code in (Exit.CONFIG, Exit.RESOURCES):  # the rank has reported the problem
        return
    console.error(
        msg("launcher.end.failed_given_up", given_up=given_up, card=card.of_run(record))
        if given_up
        else msg("launcher.end.failed", card=card.of_run(record))
    )
    if analyse:
        console.info(msg("launcher.end.analysis", analysis=analysis(run)))


def _lacks_libuv(run: rundir.RunDir, plan: Plan, outcome: Outcome) -> bool:
    """torch was built without libuv, but a script or torchrun asks for it: the ranks are started
    again without it. torchrun ignores the environment variable, so they are started directly."""
    lines = (
        line for log, since in outcome.log_from.items() for line in tail(log, SEARCHED_LINES, since)
    )
    if os.environ.get("USE_LIBUV") == "0" or not any(NO_LIBUV in line for line in lines):
        return False
    os.environ["USE_LIBUV"] = "0"
    plan["launcher"]["value"] = "spawn"
    console.warning(msg("launcher.end.no_libuv"))
    return True


def _keep_failure(run: rundir.RunDir, record: FailureRecord, created: float) -> None:
    try:
        rundir.write_json(run.failure, record)
    except OSError as error:
        console.warning(msg("launcher.cannot_write", path=run.failure, strerror=error.strerror))
    if run.own == run.path:
        run.forget_before(created)


def _node_end(run: rundir.RunDir, code: int, outcome: Outcome) -> int:
    text = msg("launcher.end.node", ranks=run.ranks)
    how = "" if outcome.ours else failure_report.statuses(outcome)
    console.success(text) if code == Exit.DONE else console.warning(
        msg("launcher.end.node_stopped", how=how, code=int(code), text=text)
    )
    return code


def _regular_end(
    run: rundir.RunDir, plan: Plan, ending: PostRun, outcome: Outcome, recovery: Recovery
) -> int:
    code = failure_report.exit_code(outcome)
    if local_ranks.is_script(plan):
        return _script_end(run, plan, code, outcome, recovery)
    recovered = recovery.finish()
    ending.report(code)
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


def _script_end(
    run: rundir.RunDir, plan: Plan, code: int, outcome: Outcome, recovery: Recovery
) -> int:
    seconds = time.time() - plan["created"]
    ranks = plural(plan["ranks"], "rank")
    status: SummaryStatus = "finished" if code == Exit.DONE else "stopped"
    if not run.is_gone():
        done: ScriptSummary = {
            "status": status,
            "ranks": plan["ranks"],
            "seconds": seconds,
            "exit_code": int(code),
        }
        if recovery.restarts:
            done["restarts"] = recovery.restarts
        rundir.write_json(run.summary, done)
    if code == Exit.DONE:
        console.success(
            msg(
                "launcher.end.script",
                ranks=ranks,
                seconds=seconds,
                recovered=recovery.finish(),
                folder=run.ranks,
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
                statuses=failure_report.statuses(outcome),
                code=int(code),
                folder=run.ranks,
            )
        )
    return code


def analysis(run: rundir.RunDir) -> str:
    """Last phase and output of every rank, and the state of the machine (enhanced script)."""
    import psutil

    lines = []
    for beat in heartbeat.read_all(run.heartbeats):
        silent = time.time() - beat.wall_time
        lines.append(
            msg(
                "launcher.analysis.rank", rank=beat.rank, beat=beat, epoch=beat.epoch, silent=silent
            )
        )
        lines += [f"      │ {line[:140]}" for line in tail(run.rank_log(beat.rank), 4)]
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(run.path)
    lines.append(
        msg(
            "launcher.analysis.machine",
            memory=memory.percent,
            disk=100 * disk.used / disk.total,
            load=os.getloadavg()[0],
        )
    )
    for check in (run_reader.read_preflight(run.preflight) or {"checks": []})["checks"]:
        if check["status"] != "ok":
            lines.append(msg("launcher.analysis.check", name=check["name"], text=check["text"]))
    return "\n".join(lines)
