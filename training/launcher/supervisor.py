"""Supervisor of one machine: prepares the data, starts the ranks, watches and reaps them, reports
the result.

The launch scripts exec it, so its exit status is theirs. It imports no torch.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from training import tasks
from training.core import console as terminal
from training.core import log as console
from training.core import manifest, messages, run_reader, rundir, standing
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.tail import tail
from training.host import process
from training.host.placement import Topology
from training.host.torch_build import NO_LIBUV
from training.launcher import (
    end_record,
    endings,
    failure_report,
    last_call,
    local_ranks,
    reached,
    several_machines,
    stop_signals,
)
from training.launcher.attempt import Attempt
from training.launcher.coordinator import Coordinator
from training.launcher.growth import Growth
from training.launcher.outcome import Outcome
from training.launcher.peer import Peer
from training.launcher.peer_link import PeerLink, Stopped
from training.launcher.post_run import PostRun
from training.launcher.reaper import Guardian
from training.launcher.recovery import Recovery
from training.launcher.stop_signals import StopSignals
from training.plan import training_plan as planner
from training.plan import writer
from training.trainer import prepared_cache

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

SEARCHED_LINES = 200  # at the end of each rank's log


def main(argv: list[str], asked: Sequence[int] = ()) -> int:
    """`asked`: the stop signals that have arrived already (process.remember_stops)."""
    try:
        return _supervise(argv, asked)
    finally:
        stop_signals.show_the_rest()


def _supervise(argv: list[str], asked: Sequence[int]) -> int:
    node = next(
        (int(word.removeprefix("--node=")) for word in argv if word.startswith("--node=")), None
    )
    messages.load_all()
    run, stages = rundir.RunDir(argv[0], node), set(argv[1:])
    plan = run_reader.read_plan(run.own_plan)
    if plan is None:
        console.error(msg("core.manifest.damaged", file=run.own_plan))
        return Exit.CONFIG
    process.outlive_terminal()
    os.environ["DUET_SUPERVISED"] = "1"
    console.of_launcher()
    console.open_log(plan["log_file"])
    planner.announce(plan)
    rundir.keep_json(
        run.supervisor,
        {
            **standing.identity(os.getpid()),
            "launch": plan["launch"],
            "started": time.time(),
            "ranks": [],
        },
    )
    ending = PostRun(run, plan)
    code, why = _run(run, plan, stages, ending, asked)
    ending.close(code, why)
    return code


def _run(
    run: rundir.RunDir, plan: Plan, stages: set[str], ending: PostRun, early: Sequence[int]
) -> tuple[int, str]:
    """(exit status, the text shown to the user where no rank has ended the run). `early`: stop
    signals before this call."""
    line: PeerLink | None = None
    try:
        stop_signals.raise_before_start(early)
        with _line(run, plan) if plan["place"]["nnodes"] > 1 else nullcontext() as line:
            _prepare(run, plan, line)
            with Guardian() as token:
                ending.begun = line is None  # else once all machines are ready
                return (
                    several_machines.train(run, plan, ending, line, token)
                    if line
                    else _attempts(run, plan, ending, stages, token)
                ), ""
    except UserError as error:
        console.report(error, msg("launcher.end.ended") if ending.begun else "")
        if ending.begun and ending.run.own == ending.run.path and not ending.left:
            saved = manifest.newest_step(ending.run.checkpoints)
            end_record.write(ending.run, plan, error.code, saved, str(error))
        return error.code, str(error)
    except OSError as error:  # a failing disk, where it is not expected: the end is still notified
        console.error(msg("launcher.end.refused", error=error, code=int(Exit.TRAINING)))
        console.to_log(traceback.format_exc())
        return Exit.TRAINING, str(error)
    except (KeyboardInterrupt, Stopped) as asked:
        terminal.hurry()
        process.ignore_stop_signals()  # another machine may have got the same one
        return _stopped_before(run, plan, asked, line, withdraw=not ending.begun)
    finally:
        if ending.run.own == ending.run.path and not ending.left:
            ending.run.remove_tokens(plan["launch"])


def _stopped_before(
    run: rundir.RunDir,
    plan: Plan,
    asked: KeyboardInterrupt | Stopped,
    line: PeerLink | None,
    *,
    withdraw: bool,
) -> tuple[int, str]:
    """Stopped before any rank was started."""
    number = _number(asked)
    if line and isinstance(asked, Stopped) and asked.node is not None:
        name = stop_signals.name(number)
        text = msg("launcher.end.other_before", node=line.name(asked.node), name=name)
    else:
        text = stop_signals.before_start(number)
    if withdraw and run.own.exists():
        removed = writer.withdraw(run)
        text = (
            msg("launcher.end.unchanged", text=text, name=run.name)
            if plan["resume"] or not removed
            else msg("launcher.end.removed", text=text, path=removed)
        )
    code = stop_signals.code(number)
    console.warning(msg("launcher.end.exit", text=text, code=int(code)))
    return code, text


def _number(asked: KeyboardInterrupt | Stopped) -> int:
    return asked.number if isinstance(asked, Stopped) else stop_signals.number_of(asked)


def _line(run: rundir.RunDir, plan: Plan) -> PeerLink:
    try:
        return Coordinator(plan) if Topology(**plan["place"]).leads else Peer(plan)
    except UserError:
        writer.withdraw(run)
        raise


def _prepare(run: rundir.RunDir, plan: Plan, line: PeerLink | None) -> None:
    """Rendezvous and data. On a UserError the run directory is withdrawn."""
    try:
        if line:
            line.gather(plan["config"]["rendezvous_timeout"])
            reached.correct(run, plan, line)
            last_call.leave_out(run, plan, line)
        if not local_ranks.is_script(plan) and tasks.spec_of(plan).reads_text:
            prepared_cache.prepare(run, plan)
    except UserError:
        writer.withdraw(run)
        raise
    except FileNotFoundError:
        if line and run.is_gone():  # node 0 was stopped and has removed it: its message has arrived
            line.go()
        raise
    except (KeyboardInterrupt, Stopped) as asked:
        if line:
            line.stop(_number(asked))
        raise


def _attempts(run: rundir.RunDir, plan: Plan, ending: PostRun, stages: set[str], token: str) -> int:
    with StopSignals() as signals, Growth(Recovery(run, plan, signals)) as growth:
        recovery = growth.recovery
        ending.restarts = recovery.restarts
        while True:
            ending.failure = None
            attempt = Attempt(run, plan, local_ranks.alone(plan), token, signals=signals)
            outcome = growth.attempt(attempt)
            if endings.folder_lost(run, plan, outcome):
                return Exit.TRAINING
            code = failure_report.exit_code(outcome)
            if growth.grows(outcome, code):
                if recovery.asked_to_stop():
                    return int(recovery.stopped or code)
                continue
            if not outcome.guilty and not outcome.killed:
                return endings.regular_end(run, plan, ending, outcome, recovery)
            if not outcome.blocked and _lacks_libuv(plan, outcome):
                continue
            # Whatever its ranks exited with: while starting they may exit with any status on a stop
            # signal.
            if outcome.asked != Exit.DONE and endings.unbegun(run, plan):
                ending.begun = False
                console.warning(
                    msg("launcher.end.before_first_step", name=run.name, code=int(outcome.asked))
                )
                return int(outcome.asked)
            record = ending.failure = failure_report.failure(outcome, run, plan)
            endings.keep_failure(run, record, plan)
            if not endings.may_help(run, outcome, record) or not recovery.again(record, outcome):
                if recovery.stopped:
                    return int(recovery.stopped)
                endings.report_end(
                    run, plan, outcome, record, recovery.given_up, analyse="--analyse" in stages
                )
                return int(record["exit_code"])
            if prepared_cache.changed(run):
                signals.unless_asked(lambda: prepared_cache.prepare(run, plan))
            if recovery.asked_to_stop():
                return int(recovery.stopped or code)


def _lacks_libuv(plan: Plan, outcome: Outcome) -> bool:
    """torch was built without libuv, but a script or torchrun asks for it: the ranks are started
    again without it. torchrun ignores the environment variable, so they are started directly."""
    lines = (
        line for log, since in outcome.log_from.items() for line in tail(log, SEARCHED_LINES, since)
    )
    if (
        outcome.watched
        or os.environ.get("USE_LIBUV") == "0"
        or not any(NO_LIBUV in line for line in lines)
    ):
        return False
    os.environ["USE_LIBUV"] = "0"
    plan["launcher"]["value"] = "spawn"
    console.warning(msg("launcher.end.no_libuv"))
    return True
