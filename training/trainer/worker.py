"""The life of one rank: plan → meet the others → data → train → summary. `train.py` calls main().

torch is imported late: a wrong flag is answered at once, and the heartbeat tells what takes so long.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import MutableMapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from training.core import heartbeat, log, phase_timeouts, rundir
from training.core.errors import Exit, NothingToDo, Stopped, UserError
from training.core.project import ENTRYPOINT
from training.host import allocator, packages, process, program
from training.host.placement import NODE
from training.trainer import flight_recorder_server

if TYPE_CHECKING:
    from training.data.prepare import Prepared
    from training.inspector.distributed import World
    from training.launcher.post_run import Ending

Plan = dict[str, Any]
POLL_S = 0.05
END_S = 3600.0  # the others wait so long for rank 0's last checkpoint
SUPERVISED = "DUET_SUPERVISED"
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
                from training.launcher import post_run as endings

                ending = endings.Ending(run, plan)
        code = int(_live(run, plan, world, ending))
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
    _begin(run, plan, rank)
    _stacks_on_request(run, rank)
    heartbeat.current.beat("importing torch")
    from training.inspector import distributed

    _open_to_watchers(run, rank)
    heartbeat.current.beat("meeting the other ranks")
    return distributed.setup(plan["device"]["value"], phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=True))


def _begin(run: rundir.RunDir, plan: Plan, rank: int) -> None:
    """From now on everybody can see what this rank does."""
    heartbeat.start(run.heartbeat(rank), rank)
    if plan["config"].get("inject"):
        from training.config import fault_spec

        fault_spec.arm(plan, run, rank, os.environ)


def _open_to_watchers(run: rundir.RunDir, rank: int) -> None:
    """Stacks and collectives can be read from outside, also while this rank hangs."""
    process.allow_tracing()
    if why_not := flight_recorder_server.serve(run.ranks, rank):
        run.event("warning", text=f"rank {rank}: which collectives it calls can not be seen from outside: {why_not}")


def _stacks_on_request(run: rundir.RunDir, rank: int) -> None:
    """SIGUSR2 writes the Python stacks of all threads, even while the main thread is blocked; so does a crash (SIGSEGV, SIGABRT …)."""
    # Open for the whole life of the process: the signal handler writes to the descriptor.
    file = (run.ranks / f"rank{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def _draft(args: list[str], environ: MutableMapping[str, str], parent: int) -> tuple[rundir.RunDir, Plan, World] | int:
    """Without a launcher of ours: every rank makes the same plan, rank 0 alone writes it; the exit code after --dry_run."""
    from training.plan import training_plan as planner
    from training.plan import writer

    # A launch script that found itself to be a rank has become this process, with its own arguments.
    request, plan, checks = planner.make(environ.pop("DUET_SCRIPT", ENTRYPOINT), args, environ)
    place = request.place
    if request.dry_run or request.check:
        return planner.show(request, plan, checks) if place.rank == 0 else 0
    program.require(tuple(packages.REQUIRED), said_by_another=place.rank != 0)
    if place.kind == NODE:
        writer.become_launcher(writer.write(plan, checks, request), environ)
    if place.world_size > 1:
        process.die_with_parent(parent)  # a killed torchrun leaves orphans otherwise
    for name in place.leftovers:
        del environ[name]
    environ.update(place.variables() | {v["name"]: v["value"] for v in plan["variables"] if v["origin"] == "set here"})
    from training.inspector import distributed

    world = distributed.setup(plan["device"]["value"], phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=False))
    run = _common_run(writer.write(plan, checks, request) if world.rank == 0 else None)
    _begin(run, plan, world.rank)
    _open_to_watchers(run, world.rank)
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


def _live(run: rundir.RunDir, plan: Plan, world: World, ending: Ending | None) -> Exit:
    """Train and, on rank 0, write the summary. `ending`: on rank 0 without a supervisor."""
    from training import tasks
    from training.inspector.distributed import barrier, cleanup
    from training.trainer import error_file, evaluate, finish, loop, metrics_writer, summary, train_state
    from training.trainer.metrics_writer import Recorder
    from training.trainer.step_stats import StopRequest

    stop = StopRequest()
    started = time.time()
    if world.device.type == "cpu":
        allocator.keep_freed_memory()
    error_file.reserve()
    data = _data(run, plan, world)
    if ending:
        ending.begun = True
    stop.listen()  # before this there is nothing to save, and a signal ends the rank
    heartbeat.current.beat("building the model")
    setup = train_state.begin(plan, run, world, tasks.make(plan, world.device, data))
    recorder = None
    if world.rank == 0:
        recorder = Recorder(run, setup.config, plan["config"] | tasks.of(plan)["options"], metrics_writer.login(plan))
        log.raw(finish.banner(world, setup, recorder.wandb))
        if setup.position.step >= setup.length.total_steps:
            log.warning(
                f"nothing left to train: step {setup.position.step} of {setup.length.total_steps}; raise --num_iterations or --num_epochs"
            )
        if text := evaluate.why_not(setup):
            log.warning(text)
        run.event("start", step=setup.position.step, world_size=world.world_size, **asdict(setup.length))
    with setup.saver if world.rank == 0 else nullcontext():
        position, code = loop.train(setup, recorder, stop)
    setup.batches.close()
    # Rank 0 may have to write a large checkpoint before it comes; a supervisor sees by its heartbeat whether it does.
    barrier("end of training", max(END_S, setup.barrier_s))
    cleanup()
    if recorder:
        done = finish.write_summary(setup, recorder, position, code, started)
        recorder.close(done, code)  # trackers may be slow, now that nobody waits for this rank any more
    if ending:
        ending.report(code)
        log.raw(summary.render(run, plan))
    heartbeat.current.beat(heartbeat.FINISHED)
    return code


def _data(run: rundir.RunDir, plan: Plan, world: World) -> Prepared | None:
    """Prepared by the supervisor, without one by rank 0; the others wait for its file, without a collective that could time out.
    None: there is nothing to prepare."""
    from training import tasks
    from training.trainer import prepared_cache

    if not tasks.reads_text(plan):
        return None
    if world.rank == 0 and SUPERVISED not in os.environ:
        heartbeat.current.beat("preparing data")
        return _prepare_alone(run, plan)
    heartbeat.current.beat("waiting for data")
    while (data := prepared_cache.published(run)) is None:
        _prove_rank_0_lives()
        time.sleep(POLL_S)
    return data


def _prove_rank_0_lives() -> None:
    """The ranks' store is rank 0's, or that of a launcher which ends us with it. Raises RuntimeError when it has gone."""
    import torch.distributed as dist

    try:
        dist.distributed_c10d._get_default_store().check(["data"])
    except RuntimeError as error:
        raise RuntimeError("rank 0 has ended while the others waited for its data") from error


def _prepare_alone(run: rundir.RunDir, plan: Plan) -> Prepared:
    """What the supervisor does where there is one. A resumed run whose new data is refused is again what it was."""
    from training.plan import writer
    from training.trainer import prepared_cache

    try:
        return prepared_cache.prepare(run, plan)
    except UserError:
        writer.give_back(run)
        raise
