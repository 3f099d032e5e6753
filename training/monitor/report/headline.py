"""Headline figures of one run."""

from __future__ import annotations

from training.core import metric_units
from training.core.jsonl import whole
from training.core.units import count, decimal, duration, milliseconds
from training.monitor.report.run import Run
from training.monitor.report.run_charts import GIB, MIB, display, ends, titled


def lasted(seconds: float) -> str:
    """Duration as in the monitor, with its unit."""
    shown = duration(seconds)
    return shown if shown.endswith("h") else f"{shown} {'h' if shown.count(':') > 1 else 'min'}"


def figures(run: Run) -> list[tuple[str, object, object]]:
    """At most 6 tuples (name, value, note), the most important ones first."""
    metrics, progress, training = run.metrics, run.state["progress"], run.state["training"]
    out: list[tuple[str, object, object]] = []
    if metrics.steps:
        total = progress["total_steps"]
        out.append(("Steps", f"{metrics.last['step']:,}", f"of {total:,}" if total else ""))
    if metrics.scores and (best := metrics.best(metrics.scores[0])):
        title, unit = titled(metrics.scores[0])
        out.append(
            (
                f"Best {title[0].lower()}{title[1:]}",
                decimal(best[1]),
                ", ".join(filter(None, [unit, f"step {best[0]:,}"])),
            )
        )
    if at := ends(run):
        out.append(
            (
                "Final loss",
                decimal(at[1]),
                ", ".join(filter(None, [display(run)[1], f"from {decimal(at[0])}"])),
            )
        )
    speed, step = metrics.median(run.counted + metric_units.PER_S), metrics.median("step_ms")
    if speed:
        out.append(("Speed", count(speed), f"{run.counted}/s, median"))
    if step:
        out.append(("Step time", milliseconds(step), "median"))
    peak = metrics.peak("memory_bytes")
    if peak:
        out.append(
            (
                "Memory",
                f"{peak / GIB:.2f} GiB" if peak >= GIB else f"{peak / MIB:.0f} MiB",
                "largest rank",
            )
        )
    elif (mfu := training.get("mfu")) is not None:
        out.append(("MFU", f"{100 * mfu:.1f} %", ""))
    elapsed = run.lasted_s
    if elapsed is not None and len(out) < 6:
        note = "from start to end" if run.ended else "so far"
        out.insert(
            0,
            (
                "Time",
                lasted(elapsed),
                f"in {run.starts} starts, without pauses"
                if run.pauses and run.starts > 1
                else note,
            ),
        )
    code = whole(run.summary.get("exit_code"))
    if not metrics.steps and code is not None:
        out.append(("Exit code", code, ""))
    return out[:6]
