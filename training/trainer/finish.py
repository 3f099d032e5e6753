"""First and last output of rank 0: the set-up banner, the sample and summary.json."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from typing import TYPE_CHECKING, cast

import torch

from training.core import heartbeat, log, metric_units, run_reader, rundir
from training.core.cells import cells
from training.core.errors import Exit
from training.core.messages import msg
from training.core.recorded_steps import RecordedSteps
from training.core.units import duration, plural
from training.data.duration import UNLIMITED
from training.inspector.distributed import World
from training.trainer import ddp_model
from training.trainer.checkpoint import TrainProgress
from training.trainer.metrics_writer import MetricsWriter
from training.trainer.train_state import TrainState

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import SummaryRecord


def banner(world: World, session: TrainState, plan: Plan, wandb: str) -> str:
    """The "Distributed Training Setup" block."""
    length, unit = session.length, session.task.unit
    title = f"── {msg('trainer.banner.title')} {'─' * 24}"
    lines = [
        title,
        msg("trainer.banner.backend", backend=world.backend, master=world.master),
        msg("trainer.banner.world_size", world_size=world.world_size),
        msg(
            "trainer.banner.device",
            device=world.device,
            hardware=_hardware(world.device),
            numerics=numerics(plan),
        ),
        msg("trainer.banner.model", model=session.task.describe(session.raw)),
        msg("trainer.banner.batch", batch=session.batch.sentence(unit)),
        msg(
            "trainer.banner.steps",
            total_steps=length.total_steps,
            steps_per_epoch=length.steps_per_epoch,
        )
        if length.total_steps < UNLIMITED
        else msg(
            "trainer.banner.until",
            time=duration(session.config.max_time),
            steps_per_epoch=length.steps_per_epoch,
        ),
        msg("trainer.banner.wandb", wandb=wandb),
        "─" * cells(title),
    ]
    return "\n".join(lines) + "\n"


def numerics(plan: Plan) -> str:
    """What the numbers of a step depend on; the plan has the reasons."""
    words = [str(plan["precision"]["value"])]
    if plan["config"]["deterministic"]:
        words.append("deterministic")
    if ddp_model.compresses(plan):
        words.append(msg("trainer.banner.compressed"))
    return msg("plan.word.comma").join(words)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return msg("trainer.banner.threads", threads=plural(threads, "thread"))


def write_summary(
    session: TrainState,
    plan: Plan,
    recorder: MetricsWriter,
    position: TrainProgress,
    code: Exit,
    started: float,
) -> SummaryRecord:
    """Write summary.json and return its content: figures from the recorded metrics (losses and
    scores of all parts of a resumed run), and generated text."""
    heartbeat.current.beat("summary")  # a long metrics.jsonl takes seconds
    recorder.flush()
    unit = session.task.unit
    speed = f"{unit}{metric_units.PER_S}"
    names = ("step_ms", "mfu", "joules_per_unit", speed)
    recorded, before = RecordedSteps(session.run, position.step, names), session.position.step
    losses = recorded.losses
    begin, end = metric_units.ends(losses) if losses else (math.nan, math.nan)
    step_ms = recorded.median("step_ms", before)
    summary: SummaryRecord = {
        "status": "done" if code == Exit.DONE else "stopped",
        "exit_code": int(code),
        "launch": plan["launch"],
        "time": time.time(),
        "seconds": time.monotonic() - started,  # since begun_at; the clock may be set meanwhile
        "begun_at": before,
        "steps": position.step,
        "parameters": session.parameters,
        "gradient_bytes": ddp_model.gradient_bytes(session.raw, plan),
        "loss_first": losses[0] if losses else math.nan,
        "loss_last": losses[-1] if losses else math.nan,
        "loss_begin": begin,
        "loss_end": end,
        "bytes_per_token": (run_reader.read_data(session.run.data) or {}).get("bytes_per_token"),
        "step_ms": math.nan if step_ms is None else step_ms,
        # of this start, as are the ranks and the estimate: an earlier one may have had other
        # hardware, or a larger batch
        "mfu": recorded.median("mfu", before),
        "joules_per_unit": recorded.median("joules_per_unit", before),
        "memory_bytes": recorded.most_memory(before),
        "checkpoint": f"step_{position.step:08d}",
        "sample": None,
    }
    if session.loss_scale:
        summary["skipped_steps"] = session.loss_scale.skipped
    named: Figures = {unit: position.tokens, **scores(recorded.evaluations)}
    # None after a resume that had nothing to train and lacks the earlier metrics.jsonl
    if (median := recorded.median(speed, before)) is not None:
        named[speed] = median
    summary = cast("SummaryRecord", {**summary, **named})
    rundir.write_json(session.run.summary, summary)
    session.run.forget_before(plan, session.run.summary)
    session.run.event("end", step=position.step, exit_code=int(code))
    if code == Exit.DONE:  # the summary of a complete training outlives an end of this process here
        complete = cast("SummaryRecord", {**summary, "sample": sample(session)})
        complete |= {"time": time.time(), "seconds": time.monotonic() - started}
        try:
            rundir.write_json(session.run.summary, complete)
        except OSError as error:
            _warn(session, error)
        else:
            return complete
    return summary


def scores(evals: dict[int, Figures]) -> dict[str, float]:
    """Each figure of the first and the last validation: val_NAME_first, val_NAME_last."""
    ends = (("first", evals[min(evals)]), ("last", evals[max(evals)])) if evals else ()
    return {
        f"{name}_{end}": value
        for end, record in ends
        for name, value in record.items()
        if name.startswith("val_")
    }


def sample(session: TrainState) -> str | None:
    """A sample of the model: text, and pictures in the run's samples/. None after an error, also
    of memory or the disk: everything has been trained and saved."""
    session.raw.eval()
    folder = session.run.samples
    try:
        folder.mkdir(exist_ok=True)
        heartbeat.current.beat("sample")  # a fault that is injected here is one of the sample
        with session.averaged(), session.autocast, torch.no_grad():
            return session.task.checked_sample(session.raw, folder)
    except Exception as error:
        _warn(session, error)
        return None
    finally:
        with contextlib.suppress(OSError):  # it is missing, or has pictures
            folder.rmdir()


def _warn(session: TrainState, error: Exception) -> None:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place, what = f"{last.filename}:{last.lineno}", f"{type(error).__name__}: {error}"
    warning = msg("trainer.finish.no_sample", place=place, error=what)
    log.warning(warning)
    session.run.event("warning", code="warning.sample", text=warning)
