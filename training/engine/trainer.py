"""The training loop. Epoch protocol, so that no rank can wait for another in a wrong place:

1. synchronise, 2. collect garbage and release cached GPU memory, 3. create the data iterator (its workers), 4. barrier:
every rank's iterator exists before any rank iterates, 5. only then the progress bar, on rank 0. Between barriers nothing
that can block: trackers have their own thread, other ranks are silent.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from training import console, heartbeat
from training.data.loader import Pair
from training.distributed import barrier
from training.engine import optim
from training.engine.checkpoint import Position
from training.engine.evaluate import Score, evaluate
from training.engine.progress import Progress, Stopwatch
from training.engine.record import Recorder
from training.engine.session import Session
from training.engine.steps import StepExchange, StopRequest
from training.errors import Exit


def train(session: Session, recorder: Recorder | None, stop: StopRequest) -> tuple[Position, Exit]:
    """Run until the last step or a wish to stop; returns where training stands, with a checkpoint saved there."""
    config, length, position = session.config, session.length, session.position
    exchange, pulse = StepExchange(session.world), heartbeat.current
    watch = Stopwatch(session.batch.total_tokens)
    code = Exit.DONE

    while position.step < length.total_steps and code == Exit.DONE:
        batches = begin_epoch(session, position)
        with Progress(session, recorder, position) as progress:
            while position.step < length.total_steps and position.epoch_steps < length.steps_per_epoch and code == Exit.DONE:
                pulse.step = position.step + 1
                rate = optim.set_rate(session.optimizer, optim.multiplier(position.step, length.total_steps, config))
                loss = forward_backward(session, batches)
                pulse.beat("reduce")
                exchange.start(loss, stop.code)
                norm = clip(session)
                pulse.beat("optimizer")
                session.optimizer.step()
                session.optimizer.zero_grad(set_to_none=True)
                report = exchange.finish(position.step + 1)

                pulse.beat("record")
                position = Position(position.step + 1, position.epoch, position.epoch_steps + 1)
                progress.step(position, report.loss, rate, float(norm), watch.lap())
                code = Exit(report.stop)
                done = position.step == length.total_steps
                if done or code != Exit.DONE or due(config.save_every, position):
                    save(session, position, required=done or code != Exit.DONE)
                    watch.restart()
                if code == Exit.DONE and config.eval_every and (done or due(config.eval_every, position)):
                    progress.evaluation(position, validate(session))
                    watch.restart()
        if position.epoch_steps >= length.steps_per_epoch:
            position = Position(position.step, position.epoch + 1, 0)
    return position, code


def due(every: int, position: Position) -> bool:
    """Is this step one of every so many? 0 is never."""
    return every > 0 and position.step % every == 0


def begin_epoch(session: Session, position: Position) -> Iterator[Pair]:
    """Steps 1 to 4 of the protocol."""
    pulse, number = heartbeat.current, position.epoch + 1
    pulse.epoch = number
    if session.world.device.type == "cuda":
        torch.cuda.synchronize()
    barrier(f"epoch {number}: synchronise", session.config.hang_timeout)
    gc.collect()
    if session.world.device.type == "cuda":
        torch.cuda.empty_cache()
    pulse.beat(f"epoch {number}: creating data iterator")
    used = position.epoch_steps * session.batch.accumulation * session.batch.device_sequences
    session.sampler.set_epoch(position.epoch, used)
    batches = iter(session.loader)
    barrier("before iteration", session.config.hang_timeout)
    return batches


def forward_backward(session: Session, batches: Iterator[Pair]) -> torch.Tensor:
    """The micro-batches of one optimizer step; returns this rank's mean loss."""
    pulse, device, steps = heartbeat.current, session.world.device, session.batch.accumulation
    total = torch.zeros((), device=device)
    for micro in range(steps):
        pulse.beat("fetch")
        inputs, targets = next(batches)
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with session.accumulate(last=micro == steps - 1):
            pulse.beat("forward")
            with session.autocast:
                loss = session.model(inputs, targets)
            pulse.beat("backward")
            (loss / steps).backward()
        total += loss.detach() / steps
    return total


def clip(session: Session) -> torch.Tensor:
    """The global gradient norm before clipping."""
    limit = session.config.grad_clip or float("inf")
    return torch.nn.utils.clip_grad_norm_(session.raw.parameters(), limit)


def validate(session: Session) -> tuple[Score | None, float]:
    """(score, seconds); every rank takes part."""
    heartbeat.current.beat("evaluation")
    started = time.perf_counter()
    session.raw.eval()
    size, tokens = session.batch.device_sequences, session.config.eval_tokens
    score = evaluate(session.raw, session.validation, session.world, size, tokens, session.autocast)
    session.raw.train()
    return score, time.perf_counter() - started


def save(session: Session, position: Position, *, required: bool) -> None:
    """Rank 0 saves. A full disk does not end the training, the next save may succeed; the last one has to (OSError)."""
    heartbeat.current.beat("checkpoint")
    if session.world.rank != 0:
        return
    try:
        session.save(position)
    except OSError as error:
        if required:
            raise
        text = f"checkpoint of step {position.step} was not saved: {error}"
        console.warning(text)
        session.run.event("warning", text=text)
