"""Training loop. Epoch protocol, so that no rank waits for another at the wrong place:

1. synchronise, 2. collect garbage and release cached GPU memory, 3. create the data iterator (its
workers), 4. barrier: every rank's iterator exists before any rank iterates, 5. then the progress
bar, on rank 0. Nothing between barriers can block: trackers and checkpoints have their own threads,
and other ranks write no output.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from training.core import heartbeat, phases
from training.core.errors import Exit
from training.data.permutation import mix
from training.inspector.checksum import checksum as checksum_of
from training.inspector.distributed import barrier
from training.tasks import randomness
from training.trainer import gradients, profiler, sanity_checks
from training.trainer.best_score import score_of
from training.trainer.checkpoint import TrainProgress
from training.trainer.evaluate import Stopped, evaluate
from training.trainer.metrics_writer import MetricsWriter
from training.trainer.prefetch import ahead
from training.trainer.progress import Progress, Stopwatch
from training.trainer.step_queue import QueuedStep, StepQueue
from training.trainer.step_stats import LocalStep, OwnTime, StepAllReduce, StopRequest
from training.trainer.train_state import TrainState

if TYPE_CHECKING:
    from training.core.contracts.run_files import ScoreRecord


SHARED = -1  # stream of random numbers that all ranks draw alike


def train(
    session: TrainState, recorder: MetricsWriter | None, stop: StopRequest
) -> tuple[TrainProgress, Exit]:
    """Run until the last step or a stop request. Returns the position, saved in a checkpoint."""
    config, position = session.config, session.position
    exchange, own, pulse = (
        StepAllReduce(session.world),
        OwnTime(session.world.device),
        heartbeat.current,
    )
    watch = Stopwatch(session.batch.total_tokens, session.world.device)
    queue = StepQueue(session, watch)
    profiled, code = profiler.planned(session), Exit.DONE
    # Objects that exist now live to the end: exclude them from the collection at an epoch's start
    # (0.1 s for modules and classes).
    gc.collect()
    gc.enable()  # disabled at the start (train.py)
    gc.freeze()

    while code == Exit.DONE and (session.unevaluated or position.step < session.length.total_steps):
        if position.step < session.length.total_steps and not session.steps_left(position):
            position = replace(position, epoch=position.epoch + 1, used=0)
        batches = begin_epoch(session, position)
        pulse.beat("progress bar")
        with Progress(session, recorder, position) as progress:
            if session.unevaluated:
                code = catch_up(session, progress, stop)
                watch.restart(watch.now())
            while (
                position.step < session.length.total_steps
                and session.steps_left(position)
                and code == Exit.DONE
            ):
                begun, number = position, position.step + 1
                since = watch.now() if profiled and profiled.begin(number) else None
                pulse.step = number
                rate = begin_step(session, position.step)
                work = forward_backward(session, batches, position, own)
                pulse.beat("reduce")
                checksum = (
                    checksum_of(session.raw) if inspected(config.inspect_every, number) else None
                )
                scale = session.loss_scale
                overflow = scale.unscale(session.weights) if scale else None
                exchange.start(number, work, checksum, stop.code, overflow, session.used_s())
                norm = clip(session)
                pulse.beat("optimizer")
                used = update(session, exchange, begun.step)
                position = after(session, begun)
                queue.add(QueuedStep(begun, position, rate, exchange.finish(norm, used), since))

                done = number == session.length.total_steps
                evaluates = config.eval_every > 0 and (done or due(config.eval_every, number))
                saves = done or due(config.save_every, number)
                last = done or not session.steps_left(position)  # of the epoch
                code = queue.read(progress, everything=evaluates or saves or last)
                if done:  # a stop request after the last step has no effect
                    code = Exit.DONE
                    if profiled:  # its last step has neither validation nor checkpoint
                        profiled.close()
                if evaluates or saves or code != Exit.DONE:
                    code = evaluate_and_save(
                        session,
                        progress,
                        position,
                        stop,
                        code,
                        evaluates=evaluates,
                        saves=saves,
                    )
                    watch.restart(watch.now())
    if profiled:  # stopped: the checkpoint came first, since its time may be short
        profiled.close()
    return position, code


def begin_step(session: TrainState, step: int) -> float:
    """Set the learning rates of a step (0-based), and make it the last one if --max_time leaves no
    time for another. Returns the rate to record. All ranks decide alike."""
    limit, total = session.time_limit, session.length.total_steps
    if limit:
        if limit.is_last(evaluates=due(session.config.eval_every, step + 1)):
            session.length = replace(session.length, total_steps=step + 1)
        total = limit.total(step)
    return session.optimizer.schedule(step, session.task.rate(step, total))


def after(session: TrainState, begun: TrainProgress) -> TrainProgress:
    """The position after the step that began at `begun`."""
    used = begun.used + session.batches.step_sequences
    return TrainProgress(
        begun.step + 1, begun.epoch, used, begun.tokens + session.batch.total_tokens
    )


def due(every: int, step: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 is never."""
    return every > 0 and step % every == 0


def inspected(every: int, step: int) -> bool:
    """As `due`, and also the first step: DDP's copy of the weights is verified before training."""
    return due(every, step) or (every > 0 and step == 1)


def begin_epoch(session: TrainState, position: TrainProgress) -> Iterator[Any]:
    """Steps 1 to 4 of the protocol."""
    pulse, number = heartbeat.current, position.epoch + 1
    pulse.epoch = number
    if session.world.device.type == "cuda":
        torch.cuda.synchronize()
    barrier(f"epoch {number}: synchronise", session.barrier_s)
    gc.collect()
    if session.world.device.type == "cuda":
        torch.cuda.empty_cache()
    pulse.beat(f"epoch {number}: creating data iterator")
    sanity_checks.prove_shards(session, position)
    batches = session.batches.epoch(position.epoch, position.used)
    barrier("before iteration", session.barrier_s)
    device = session.world.device
    if device.type != "cuda":
        return batches
    needed = session.steps_to_train(position) * session.batch.accumulation
    return ahead(islice(batches, needed), session.task.arrive, device)


def forward_backward(
    session: TrainState, batches: Iterator[Any], position: TrainProgress, own: OwnTime
) -> LocalStep:
    """The micro-batches of one optimizer step. The time of a backward pass is not attributed to any
    rank, since the ranks wait for each other in it."""
    pulse, task, steps = heartbeat.current, session.task, session.batch.accumulation
    draw_anew(session, position.step, session.world.rank)  # ranks drop differently
    total, sequences = torch.zeros(()), 0
    for micro in range(steps):
        pulse.beat("fetch")
        own.begin()
        batch = next(batches)
        sequences += task.count(batch)
        with session.accumulate(last=micro == steps - 1):
            pulse.beat("forward")
            with session.autocast:
                loss = task.checked_loss(session.model, batch)
            own.end()
            pulse.beat("backward")
            loss = loss / steps if steps > 1 else loss
            (session.loss_scale.scaled(loss) if session.loss_scale else loss).backward()
        total = total + loss.detach() if micro else loss.detach()
        del batch  # its memory is for the one that is read next
    return LocalStep(total, sequences, own.step_ms())


def draw_anew(session: TrainState, step: int, stream: int) -> None:
    """A task's random numbers depend only on (seed, step, stream), so that a resumed run draws the
    same. `stream`: a rank, or SHARED."""
    if session.task.random:
        randomness.reseed(mix(mix(session.config.seed + step) + stream))


def clip(session: TrainState) -> torch.Tensor:
    """Clip gradients. Returns their global norm before clipping, without those that DDP does not
    exchange."""
    norm, *_ = [gradients.clip(part, session.config.grad_clip) for part in session.clipped]
    return norm


def update(session: TrainState, exchange: StepAllReduce, step: int) -> torch.Tensor | None:
    """Step the optimizer, and average the weights. With fp16 this changes nothing if any rank's
    gradients are not finite; returns the loss scale of the step. `step`: 0-based."""
    draw_anew(session, step, SHARED)  # an optimizer that adds noise must not change the ranks apart
    scale = session.loss_scale
    overflow, used = (exchange.overflow(), scale.scale.clone()) if scale else (None, None)
    session.optimizer.step(overflow)
    session.optimizer.zero_grad()
    if session.average:
        session.average.update(step, overflow)
    if scale and overflow is not None:
        scale.update(overflow)
    return used


def evaluate_and_save(
    session: TrainState,
    progress: Progress,
    position: TrainProgress,
    stop: StopRequest | None,
    code: Exit,
    *,
    evaluates: bool,
    saves: bool,
) -> Exit:
    """What follows a step; after a stop request, with its `code`, only the checkpoint. Returns the
    code, maybe of a request during the evaluation. `stop`: None for one that is not stopped."""
    done = position.step >= session.length.total_steps
    # Before the checkpoint: after a kill between the two, a resumed run would skip this validation.
    score, better = None, False
    if evaluates and code == Exit.DONE:
        try:
            score, better = validate(session, progress, position, stop)
        except Stopped as stopped:
            code = stopped.code
    if done or saves or better or code != Exit.DONE:
        progress.checkpoint()
        heartbeat.current.beat("gather state")
        session.save(
            position,
            score,
            required=done or code != Exit.DONE,
            unevaluated=evaluates and code != Exit.DONE and session.validation is not None,
        )
    if done and code != Exit.DONE:
        # A run that has trained its last step is not stopped, but it may be killed soon: with its
        # checkpoint written, it evaluates again.
        return evaluate_and_save(
            session, progress, position, None, Exit.DONE, evaluates=True, saves=True
        )
    return code


def validate(
    session: TrainState,
    progress: Progress,
    position: TrainProgress,
    stop: StopRequest | None = None,
) -> tuple[ScoreRecord | None, bool]:
    """Evaluate, with the averaged weights if there are any, and record it; all ranks take part.
    Returns the score and whether --keep_best saves it. Raises Stopped."""
    phase = phases.EVALUATION if session.evaluated else phases.FIRST_EVALUATION
    heartbeat.current.beat(phase)
    session.evaluated = True
    started = time.perf_counter()
    draw_anew(session, position.step, session.world.rank)
    with session.averaged():
        scores = evaluate(session, stop)
    if session.time_limit:
        session.time_limit.evaluated()
    progress.evaluation(position, (scores, time.perf_counter() - started))
    score, best = score_of(scores), session.best
    better = best is not None and best.improves(score, position.step, session.saver.lost)
    return score, better


def catch_up(session: TrainState, progress: Progress, stop: StopRequest) -> Exit:
    """The evaluation that a stop request prevented at the step of the loaded checkpoint."""
    session.unevaluated = False
    return evaluate_and_save(
        session, progress, session.position, stop, Exit.DONE, evaluates=True, saves=False
    )
