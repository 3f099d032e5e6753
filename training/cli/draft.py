"""A rank started without Duet's launcher: makes the plan itself, together with the other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from training.cli import joining, restarted
from training.cli import plan as plan_command
from training.config import flags
from training.core import log, rundir
from training.core.errors import UserError
from training.core.project import ENTRYPOINT
from training.host import packages, process, program
from training.host.placement import NODE
from training.launcher import continued_run, rendezvous, resumed_run, spawn, stop_signals
from training.launcher.communication.start_test import StartTest
from training.launcher.post_run import PostRun
from training.plan import training_plan as planner
from training.plan import writer
from training.trainer import worker

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.inspector.distributed import World
    from training.plan import preflight
    from training.plan.request import Request


__all__ = ["PostRun", "draft"]


def draft(
    args: list[str], environ: MutableMapping[str, str], parent: int
) -> tuple[rundir.RunDir, Plan, World] | int:
    """Every rank makes the same plan, only rank 0 writes it. Returns the exit code for --dry_run,
    and where torchrun has restarted ranks that have nothing left to do."""
    # DUET_SCRIPT: a launch script in a rank has become this process, with its own arguments.
    script, received = environ.pop("DUET_SCRIPT", ENTRYPOINT), resumed_run.Received()
    if agent := restarted.agent(environ, parent):
        ended = restarted.resume(script, args, environ, agent)
        if ended is not None:
            return ended
    line = flags.parse(args)
    test = StartTest(only_check=line.on("check"))
    try:
        request, plan, checks = planner.make(script, args, environ, received, test)
        place = request.place
        if not request.dry_run:
            program.require(tuple(packages.REQUIRED), said_by_another=place.local_rank != 0)
        if place.kind == NODE and not (request.dry_run or request.check):
            _become_launcher(request, plan, checks, environ)
    except UserError as error:
        received.withdraw()
        plan_command.answer_refused(line, error)
        raise
    except process.StopAsked as asked:
        received.withdraw()
        return plan_command.stopped(asked)
    if request.dry_run or request.check:
        return plan_command.show(request, plan, checks, test.result) if place.rank == 0 else 0
    if place.world_size > 1:
        process.die_with_parent(parent)  # otherwise a killed torchrun leaves orphans
    for name in place.leftovers:
        del environ[name]
    environ.update(
        place.variables()
        | {v["name"]: v["value"] for v in plan["variables"] if v["origin"] == "set here"}
    )
    world = joining.join(plan, place, environ)
    if agent:
        plan["agents"] = restarted.agents(agent, place)
        plan["torchrun_id"] = environ.get(restarted.RUN_ID, "")
    own = None
    if world.rank == 0:
        own = writer.write(plan, checks, request, rendezvous.ask, os.getpid())
        spawn.remove_stale(own, lambda rank: True)
    run = _common_run(own, world)
    spawn.remove_stale(run, lambda rank: rank == world.rank)  # without a disk in common
    worker.begin(run, plan, world.rank)
    worker.open_to_watchers(run, world.rank)
    plan = _planned(run, plan)
    if world.rank == 0:
        log.open_log(plan["log_file"])
        planner.announce(plan)
    stop_signals.raise_before_start()
    return run, plan, world


def _become_launcher(
    request: Request, plan: Plan, checks: list[preflight.Check], environ: Mapping[str, str]
) -> NoReturn:
    """Start the ranks of this node, as the launch scripts do."""
    find = partial(continued_run.of_plan, resumed=request.resume_from)
    begins = process.hold_stops  # the supervisor withdraws the run
    run = writer.write(plan, checks, request, plan_command.ask, request.starter, find, begins)
    writer.become_launcher(run, environ)


def _common_run(own: rundir.RunDir | None, world: World) -> rundir.RunDir:
    """Rank 0's run directory on every rank; without a shared disk a folder of the same name with
    the same plan, made by the first rank of the machine."""
    from training.inspector import distributed

    told = ""
    if own:
        plan = worker.planned(own)
        told = json.dumps({"path": str(own.path), "plan": plan})
        own.token(plan["launch"]).touch()
    known = json.loads(distributed.from_main("run", told))
    run, plan = rundir.RunDir(known["path"]), known["plan"]
    if world.local_rank == 0 and not _is_common(run, plan):
        run.data.unlink(missing_ok=True)  # of an earlier start
        rundir.write_json(run.plan, {**plan, "shared": False})
    distributed.barrier("run directory")
    if own:
        own.remove_tokens(plan["launch"])
    return run


def _is_common(run: rundir.RunDir, plan: Plan) -> bool:
    """Does this machine see rank 0's run directory? Creates it if it does not."""
    token = run.token(plan["launch"])
    if token.exists():
        return True
    # An NFS client may remember that there was no such folder until it makes one.
    run.create()
    return token.exists()


def _planned(run: rundir.RunDir, own: Plan) -> Plan:
    """Rank 0's plan with the GPUs that this rank sees, on another machine or alone."""
    return {**worker.planned(run), "gpus": own["gpus"]}
