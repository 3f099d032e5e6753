"""Lifecycle of a rank: plan → join the others → data → train → summary. `train.py` calls main().

torch is imported late: an invalid flag is reported at once, and the heartbeat shows slow phases.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, cast

from training.core import crash_stacks, heartbeat, log, run_reader, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.host import allocator, gpus, process
from training.trainer import flight_recorder_server, memory_snapshot, power

if TYPE_CHECKING:
    from training.core.contracts.events import StartLength
    from training.core.contracts.plan import Plan
    from training.inspector.distributed import World


class PostRunHook(Protocol):
    """End of a run on rank 0 without a supervisor (training.launcher.post_run)."""

    begun: bool

    def report_unless_preempted(self, code: int) -> None: ...


END_S = 3600.0  # maximum wait for rank 0's last checkpoint
SUPERVISED = "DUET_SUPERVISED"


def begin(run: rundir.RunDir, plan: Plan, rank: int) -> None:
    """Start the heartbeat, hide the GPUs from a run on the CPU, and arm faults to inject."""
    heartbeat.start(run.heartbeat(rank), rank)
    if plan["device"]["value"] == "cpu":
        # In every step torch's Adam asks the current stream of a GPU whether it is captured, which
        # creates a context on the GPU: hundreds of MiB of its memory.
        os.environ[gpus.VISIBLE] = ""
    if plan["config"].get("inject"):
        from training.trainer import inject

        inject.arm(plan, run, rank, os.environ)


def open_to_watchers(run: rundir.RunDir, rank: int) -> None:
    """Make stacks and collectives readable from outside, even while this rank hangs."""
    process.allow_tracing()
    if why_not := flight_recorder_server.serve(run.ranks, rank):
        text = msg("trainer.worker.hidden", rank=rank, why_not=why_not)
        run.event("warning", code="warning.collectives_hidden", text=text)


def stacks_on_request(run: rundir.RunDir, rank: int) -> None:
    """SIGUSR2 writes the Python stacks of all threads, even while the main thread is blocked; so
    does a crash (SIGSEGV, SIGABRT …)."""
    # Open for the whole life of the process: the signal handler writes to the descriptor.
    file = (run.ranks / f"rank{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    crash_stacks.write_to(file)


def live(run: rundir.RunDir, plan: Plan, world: World, ending: PostRunHook | None) -> Exit:
    """Train and, on rank 0, write the summary. `ending`: on rank 0 without a supervisor."""
    from training import tasks
    from training.inspector.distributed import barrier, cleanup
    from training.tasks import randomness
    from training.trainer import (
        error_file,
        evaluate,
        finish,
        forecast,
        loop,
        metrics_writer,
        rank_data,
        summary,
        train_state,
    )
    from training.trainer.metrics_writer import MetricsWriter
    from training.trainer.step_stats import StopRequest

    stop = StopRequest()
    started = time.monotonic()
    if world.device.type == "cpu":
        allocator.keep_freed_memory()
    else:
        memory_snapshot.watch(stacks=bool(plan["config"].get("debug")))
    error_file.reserve()
    data = rank_data.prepared(run, plan, world, supervised=SUPERVISED in os.environ)
    if ending:
        ending.begun = True
    stop.listen()  # before this there is nothing to save, and a signal ends the rank
    heartbeat.current.beat("building the model")
    randomness.seed(plan["config"]["seed"])  # a user's file may draw when it is run
    setup = train_state.begin(plan, run, world, tasks.make(plan, world.device, data))
    recorder = None
    if world.rank == 0:
        recorder = MetricsWriter(
            run,
            setup.config,
            plan["config"] | tasks.task_of(plan)["options"],
            metrics_writer.login(plan),
        )
        recorder.forecast = forecast.Forecast(setup)
        recorder.power = power.meter(plan, world.world_size)
        log.raw(finish.banner(world, setup, plan, recorder.wandb))
        if setup.position.step >= setup.length.total_steps and not setup.unevaluated:
            log.warning(
                msg(
                    "trainer.worker.nothing_left",
                    step=setup.position.step,
                    total=setup.length.total_steps,
                )
            )
        if text := evaluate.why_not(setup):
            log.warning(text)
        run.event(
            "start",
            step=setup.position.step,
            world_size=world.world_size,
            **cast("StartLength", setup.length.record()),
        )
    if setup.time_limit:  # not before: trackers have logged in
        setup.time_limit.start()
    with setup.saver if world.rank == 0 else nullcontext():
        position, code = loop.train(setup, recorder, stop)
    setup.batches.close()
    # Rank 0 may first write a large checkpoint; its heartbeat shows a supervisor whether it makes
    # progress.
    barrier("end of training", max(END_S, setup.barrier_s))
    if not recorder:
        heartbeat.current.beat(heartbeat.FINISHED)  # a crash in cleanup() loses nothing
    cleanup()
    if recorder:
        done = finish.write_summary(setup, plan, recorder, position, code, started)
        # trackers may be slow: no rank waits for this one any more
        recorder.close(done, code)
        if ending:
            ending.report_unless_preempted(code)
            log.raw(summary.render(run, plan))
        heartbeat.current.beat(heartbeat.FINISHED)
    return code


def planned(run: rundir.RunDir) -> Plan:
    """The run's plan. Raises FileNotFoundError, and UserError for a later version's plan."""
    plan = run_reader.read_plan(run.plan)
    if plan is None:
        raise FileNotFoundError(msg("core.manifest.damaged", file=run.plan))
    return plan
