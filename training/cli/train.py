"""One rank as a command: what `train.py` calls. Plan → meet the others → training.trainer.worker.

torch is imported late: a wrong flag is answered at once, and the heartbeat tells what takes so long.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from training.cli import plan as plan_command
from training.core import heartbeat, log, phase_timeouts, rundir
from training.core.errors import Exit, NothingToDo, Stopped, UserError
from training.core.project import ENTRYPOINT
from training.host import packages, process, program
from training.host.placement import NODE
from training.launcher import rendezvous
from training.plan import training_plan as planner
from training.plan import writer
from training.trainer import worker
from training.trainer.worker import SUPERVISED

if TYPE_CHECKING:
    from training.inspector.distributed import World
    from training.launcher.post_run import Ending


Plan = dict[str, Any]
ENDED = "the ranks had been started and have ended"


def main(args: list[str], environ: MutableMapping[str, str]) -> int:
    """Returns the exit code; problems of the user end without a traceback, other failures with one in the rank's log."""
    if any(a in ("-h", "--help") for a in args):
        from training.plan.option_help import option_lines

        print("python train.py CONFIG [--key=value …]\n" + "\n".join(option_lines()))
        return 0
    if "--inject=list" in args:
        from training.config import fault_spec

        print(fault_spec.overview())
        return 0
    run: rundir.RunDir | None = None
    ending: Ending | None = None
    try:
        if rundir.VARIABLE in environ and SUPERVISED in environ:
            run = rundir.RunDir(environ[rundir.VARIABLE])
            plan = _planned(run)
            world = _meet(run, plan, int(environ.get("RANK", 0)))
        else:
            draft = _draft(args, environ, os.getppid())
            if isinstance(draft, int):
                return draft
            run, plan, world = draft
            if world.rank == 0:
                ending = post_run.Ending(run, plan)
        code = int(worker.live(run, plan, world, ending))
        if ending:
            ending.close(code)
        return code
    except NothingToDo as done:
        if str(done):
            log.success(str(done))
        return int(Exit.DONE)
    except UserError as error:
        code = _report(error, run, int(environ.get("RANK", 0)))
        if ending:
            ending.close(code, str(error))
        if isinstance(error, Stopped):
            sys.stdout.flush()
            os._exit(code)  # as below: the other ranks wait
        return code
    except Exception as error:
        if run is None:
            raise
        if run.is_gone():
            log.error(f"the run directory {run.path} has disappeared: nothing can be saved (exit {int(Exit.TRAINING)})")
            os._exit(Exit.TRAINING)
        from training.trainer import error_file, metrics_writer

        status = error_file.record(run, int(environ.get("RANK", 0)), error)
        sys.stdout.flush()
        metrics_writer.failed(status)
        if ending and plan["ranks"] == 1:
            ending.close(status)
        # Leave at once: the other ranks may wait for this one in a collective, and a tear-down could block here too.
        os._exit(status)


def _report(error: UserError, run: rundir.RunDir | None, rank: int) -> int:
    """The problem once for all ranks, and what this one has to record of it. Returns the exit code."""
    error.said_by_another |= run is not None and rank != 0
    if not isinstance(error, Stopped):
        log.report(error, "nothing was launched" if run is None else ENDED)
    else:
        log.report(error, error.closing)
        if run:
            from training.trainer import error_file, metrics_writer

            error_file.note(run, rank, error)
            metrics_writer.failed(int(error.code))
    return int(error.code)


def _planned(run: rundir.RunDir) -> Plan:
    plan = rundir.read_json(run.plan)
    if plan is None:
        raise FileNotFoundError(f"{run.plan} is missing or damaged")
    return plan


def _meet(run: rundir.RunDir, plan: Plan, rank: int) -> World:
    worker.begin(run, plan, rank)
    worker.stacks_on_request(run, rank)
    heartbeat.current.beat("importing torch")
    from training.inspector import distributed

    worker.open_to_watchers(run, rank)
    heartbeat.current.beat("meeting the other ranks")
    return distributed.setup(plan["device"]["value"], phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=True))


def _draft(args: list[str], environ: MutableMapping[str, str], parent: int) -> tuple[rundir.RunDir, Plan, World] | int:
    """Without a launcher of ours: every rank makes the same plan, rank 0 alone writes it; the exit code after --dry_run."""
    # A launch script that found itself to be a rank has become this process, with its own arguments.
    request, plan, checks = planner.make(environ.pop("DUET_SCRIPT", ENTRYPOINT), args, environ)
    place = request.place
    if request.dry_run or request.check:
        return plan_command.show(request, plan, checks) if place.rank == 0 else 0
    program.require(tuple(packages.REQUIRED), said_by_another=place.rank != 0)
    if place.kind == NODE:
        writer.become_launcher(writer.write(plan, checks, request, rendezvous.ask), environ)
    if place.world_size > 1:
        process.die_with_parent(parent)  # a killed torchrun leaves orphans otherwise
    for name in place.leftovers:
        del environ[name]
    environ.update(place.variables() | {v["name"]: v["value"] for v in plan["variables"] if v["origin"] == "set here"})
    from training.inspector import distributed

    world = distributed.setup(plan["device"]["value"], phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=False))
    run = _common_run(writer.write(plan, checks, request, rendezvous.ask) if world.rank == 0 else None)
    worker.begin(run, plan, world.rank)
    worker.open_to_watchers(run, world.rank)
    plan = _planned(run)
    if world.rank == 0:
        log.open_log(plan["log_file"])
        planner.announce(plan)
    return run, plan, world


def _common_run(own: rundir.RunDir | None) -> rundir.RunDir:
    """Rank 0's run directory on every rank; where its disk is not seen, a folder of the same name with its plan."""
    from training.inspector import distributed

    told = distributed.from_main("run", json.dumps({"path": str(own.path), "plan": rundir.read_json(own.plan)}) if own else None)
    run, plan = rundir.RunDir(json.loads(told)["path"]), json.loads(told)["plan"]
    seen = rundir.read_json(run.plan)
    if seen is None or seen["created"] != plan["created"]:
        run.create()
        rundir.write_json(run.plan, plan)
    return run
