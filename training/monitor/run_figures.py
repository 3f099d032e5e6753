"""Progress, training figures and curves of one run, from its records; its newest checkpoint."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from training.core import manifest, metric_units, rundir, standing
from training.core.course import median, percentile
from training.core.jsonl import Record, dig, mtime, number, read_object, whole
from training.monitor.run_status import FINISHED, RUNNING, script_of

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import (
        CheckpointState,
        CurveState,
        ProgressState,
        TrainingState,
    )
    from training.monitor.history import History

CURVE_POINTS = 240


def progress(
    run: rundir.RunDir,
    history: History,
    plan: Record | None,
    state: RunStatus,
    *,
    since: float,
    elapsed_s: float | None,
    summary: Record | None,
    planned: tuple[int | None, int | None],
) -> ProgressState:
    """`planned`: steps and epochs that the last start announced; `since`: its time, unix s."""
    data = read_object(standing.data_file(run))
    total = (
        whole(dig(data, "total_steps"))
        or planned[0]
        or whole(dig(plan, "config", "num_iterations"))
        or None
    )
    step = whole(history.last.get("step")) or 0
    if state == FINISHED and whole(dig(summary, "steps")) == step:
        total = step  # a resume that had nothing left to do may have planned more
    pace = history.seconds_per_step(since)
    # the time since the last step counts too: an evaluation may take long
    late = max(0.0, time.time() - (number(history.last.get("time")) or math.inf))
    steps = total - step if total else 0
    left = [max(0.0, steps * pace - late)] if steps > 0 and pace is not None else []
    percent = [100 * step / total] if total else []
    limit, used = number(dig(plan, "config", "max_time")), number(history.last.get("used_s"))
    if limit and used is not None:
        left.append(max(0.0, limit - used - late))
        percent.append(100.0 if state == FINISHED else 100 * used / limit)
    return {
        "step": None if script_of(plan) else step,
        "total_steps": total,
        "percent": min(100.0, max(percent)) if percent else None,
        "epoch": whole(history.last.get("epoch")),
        "epochs": whole(dig(data, "epochs")) or planned[1],
        "elapsed_s": elapsed_s,
        "eta_s": min(left) if left and state == RUNNING else None,
    }


def training(run: rundir.RunDir, history: History, since: float) -> TrainingState:
    last, evaluation = history.last, history.evaluation()
    unit = metric_units.counted(last)
    tokens = metric_units.as_samples(unit) == metric_units.TOKENS
    count = metric_units.so_far(last)
    speed = median(history.of_last_steps(f"{unit}{metric_units.PER_S}"))
    loss, times = number(last.get("loss")), history.of_last_steps("step_ms")
    return {
        "loss": loss,
        "loss_unit": metric_units.loss_unit(last),
        "bytes_per_token": number(dig(read_object(run.data), "bytes_per_token")),
        "loss_is_finite": None if loss is None else math.isfinite(loss),
        "eval_name": evaluation["eval_name"],
        "eval_unit": evaluation["eval_unit"],
        "eval_last": evaluation["eval_last"],
        "eval_best": evaluation["eval_best"],
        "eval_best_step": evaluation["eval_best_step"],
        "eval_averaged": evaluation["eval_averaged"],
        "lr": number(last.get("lr")),
        "grad_norm": number(last.get("grad_norm")),
        "loss_scale": number(last.get("loss_scale")),
        "skipped_steps": whole(last.get("skipped_steps")),
        "unit": unit,
        "tokens": count if tokens else None,
        "samples": None if tokens else count,
        "tokens_per_s": speed if tokens else None,
        "samples_per_s": None if tokens else speed,
        "mfu": median(history.of_last_steps("mfu")),
        "joules_per_unit": median(history.of_last_steps("joules_per_unit")),
        "memory_bytes": max(
            (m for m in history.of_ranks("memory_bytes") if m is not None), default=None
        ),
        "step_ms_median": median(times),
        "step_ms_p95": percentile(times, 95),
        "steps_measured": history.measured(since),
        "last_step_unix_s": number(last.get("time")),
    }


def curves(history: History) -> tuple[CurveState, CurveState]:
    """(loss, speed)."""
    speed = metric_units.SPEEDS[metric_units.as_samples(metric_units.counted(history.last))]
    return (
        {"points": [{"step": s, "loss": v} for s, v in history.curve(CURVE_POINTS)]},
        {"points": [{"step": s, speed: v} for s, v in history.speed_curve(CURVE_POINTS)]},
    )


def newest_checkpoint(run: rundir.RunDir) -> CheckpointState | None:
    found = manifest.all_in(run.checkpoints)
    if not found:
        return None
    path = found[-1]
    return {"path": str(path), "step": manifest.step_of(path), "time_unix_s": mtime(path)}
