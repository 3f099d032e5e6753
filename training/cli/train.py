"""Entry of a rank, called by `train.py`: plan → rendezvous → training.trainer.worker.

Imports torch late, so that invalid flags are reported at once and the heartbeat covers the import.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from training.core import heartbeat, log, messages, phase_timeouts, rundir
from training.core.errors import EXIT_MEANING, Exit, NothingToDo, RunStopped, UserError
from training.core.messages import msg
from training.core.project import typed
from training.host import placement, process
from training.trainer import flight_recorder_server, worker
from training.trainer.worker import SUPERVISED

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.inspector.distributed import World
    from training.launcher.post_run import PostRun


STORE_S = 0.5  # before rank 0, which may serve the store, ends: others may read the same problem
ENDED = msg("cli.train.ended")


def main(args: list[str], environ: MutableMapping[str, str]) -> int:
    """Returns the exit code. User errors have no traceback, those of other failures are in the
    rank's log."""
    if _is_answered(args):
        return 0
    messages.load_all()
    run: rundir.RunDir | None = None
    ending: PostRun | None = None
    watched = rundir.VARIABLE in environ and SUPERVISED in environ
    try:
        if watched:
            known = rundir.RunDir(environ[rundir.VARIABLE])
            plan = worker.planned(known)
            run = known  # not before: without a plan an error is only reported
            world = _meet(run, plan, int(environ.get("RANK", 0)))
        else:
            from training.cli import draft as without_launcher

            draft = without_launcher.draft(args, environ, os.getppid())
            if isinstance(draft, int):
                return draft
            run, plan, world = draft
            if world.rank == 0:
                ending = without_launcher.PostRun(run, plan)
        code = int(worker.live(run, plan, world, ending))
        if ending:
            ending.close(code)
        _leave_trackers(run, code)
        return code
    except NothingToDo as done:
        if str(done):
            log.success(typed(str(done)))
        return int(Exit.DONE)
    except UserError as error:
        if run is None:
            log.report(error)
            return int(error.code)
        begins = _log_end(run)
        code = _report(error, run, plan, watched=watched)
        if not watched:
            _end_alone(run, plan, code, ending, begins)
        if ending:
            ending.close(code, str(error))
        _leave(run, code)
    except KeyboardInterrupt as asked:  # before StopRequest.listen()
        if run is None or watched:
            raise
        _stop(run, plan, asked, ending)
    except Exception as error:
        if run is None:
            raise
        try:
            final = _final(error)
        except Exception as later:  # of torch's SIGCHLD handler, which may run in any call
            final = _final(later)
        _fail(run, plan, final, ending, watched=watched)


def _is_answered(args: list[str]) -> bool:
    """Print what was asked for instead of a run, if anything."""
    if any(a in ("-h", "--help") for a in args):
        from training.plan.option_help import option_lines

        print("python train.py CONFIG [--key=value …]\n" + "\n".join(option_lines()))
        return True
    if "--inject=list" in args:
        from training.config import fault_spec

        print(fault_spec.overview())
        return True
    return False


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _stop(
    run: rundir.RunDir, plan: Plan, asked: KeyboardInterrupt, ending: PostRun | None
) -> NoReturn:
    """End a rank without a supervisor that has got a stop signal before the training began."""
    process.ignore_stop_signals()
    from training.launcher import rank_end

    code = rank_end.stopped(run, plan, asked)
    if ending:
        ending.begun = run.failure.exists()
        ending.close(code)
    _exit_at_once(code)


def _log_end(run: rundir.RunDir) -> int:
    file = run.rank_log(_rank())
    return file.stat().st_size if file.exists() else 0


def _final(error: BaseException) -> BaseException:
    from training.trainer import error_file

    return error_file.final(error)


def _fail(
    run: rundir.RunDir, plan: Plan, error: BaseException, ending: PostRun | None, *, watched: bool
) -> NoReturn:
    if run.is_gone():
        log.error(msg("cli.train.run_gone", path=run.path, status=int(Exit.TRAINING)))
        os._exit(Exit.TRAINING)
    from training.trainer import error_file, metrics_writer

    begins = _log_end(run)
    status = error_file.record(run, _rank(), error)
    sys.stdout.flush()
    if not watched:
        status = _end_alone(run, plan, status, ending, begins)
    metrics_writer.failed(status)
    if ending and plan["ranks"] == 1:
        ending.close(status)
    # Exit at once: other ranks may wait in a collective, and a teardown could block.
    os._exit(status)


def _end_alone(
    run: rundir.RunDir, plan: Plan, status: int, ending: PostRun | None, begins: int
) -> int:
    """Report the failure of a rank without a supervisor; the exit code. `begins`: where its report
    begins in its log."""
    from training.launcher import rank_end

    try:
        code, record = rank_end.report(run, plan, _rank(), status, begins)
    except Exception as failed:  # it must not keep this process, for which other ranks may wait
        code = status if status in EXIT_MEANING else int(Exit.TRAINING)
        file, name = run.rank_log(_rank()), type(failed).__name__
        log.error(msg("cli.train.unreported", log=file, name=name, error=failed, code=code))
        return code
    if ending:
        ending.failure = record
    return code


def _leave_trackers(run: rundir.RunDir, code: int) -> None:
    """End the process at once if a tracker failed or was abandoned: W&B's exit handler waits for
    its service without a limit, and prints a traceback if it is gone."""
    from training.trainer import metrics_writer

    if metrics_writer.exits_cleanly():
        return
    flight_recorder_server.stop(run.ranks, 0)  # only rank 0 has trackers
    _exit_at_once(code)


def _leave(run: rundir.RunDir, code: int) -> NoReturn:
    """End a rank that has reported a problem. Others notice the end by their connections: the
    launcher must see this exit first."""
    flight_recorder_server.stop(run.ranks, _rank())
    if _rank() == 0:
        time.sleep(STORE_S)
    _exit_at_once(code)


def _exit_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(error: UserError, run: rundir.RunDir, plan: Plan, *, watched: bool) -> int:
    """Report an error of this rank, unless another one has reported its own, and record it. Returns
    the exit code. What other ranks than 0 print is not on the console of a supervisor, which
    reports what they have recorded. What those of another machine print and record may not reach
    the one of rank 0, which reports its own error then."""
    from training.inspector import distributed
    from training.trainer import error_file, metrics_writer

    rank = _rank()
    first = not error.said_by_another and distributed.is_first("user_error")
    if rank == 0:
        error.said_by_another |= not first and placement.on_one_machine(plan["place"])
    else:
        host = socket.gethostname()
        error.problems = [
            replace(one, what=msg("cli.train.of_rank", rank=rank, host=host, what=one.what))
            for one in error.problems
        ]
        with contextlib.suppress(OSError):
            log.open_log(run.rank_log(rank))
    closing = error.closing if isinstance(error, RunStopped) else ENDED
    log.report(error, closing, shown=rank == 0 or (first and not watched))
    if isinstance(error, RunStopped) or (rank and first):
        error_file.note(run, rank, error)
    metrics_writer.failed(int(error.code))  # a task may raise one in the middle of training
    return int(error.code)


def _meet(run: rundir.RunDir, plan: Plan, rank: int) -> World:
    worker.begin(run, plan, rank)
    worker.stacks_on_request(run, rank)
    heartbeat.current.beat("importing torch")
    from training.inspector import distributed

    worker.open_to_watchers(run, rank)
    heartbeat.current.beat("rendezvous with the other ranks")
    return distributed.setup(
        plan["device"]["value"],
        phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=True),
    )
