"""Headline figures of one run."""

from __future__ import annotations

from training.core import metric_units, units
from training.core.jsonl import whole
from training.core.messages import msg
from training.core.units import GIB, MIB, count, decimal, duration, milliseconds
from training.monitor.report.curve import score_text
from training.monitor.report.run import Run
from training.monitor.report.run_charts import display, ends, titled


def lasted(seconds: float) -> str:
    """Duration as in the monitor, with its unit."""
    shown = duration(seconds)
    return shown if shown.endswith("h") else f"{shown} {'h' if shown.count(':') > 1 else 'min'}"


def _with_energy(note: str, run: Run) -> str:
    joules = run.metrics.median("joules_per_unit")
    if joules is None:
        return note
    energy = f"{units.joules(joules)}/{metric_units.one(run.counted)}"
    return msg("monitor.report.headline.with_energy", note=note, energy=energy)


def figures(run: Run) -> list[tuple[str, object, object]]:
    """At most 6 tuples (name, value, note), the most important ones first."""
    metrics, progress, training = run.metrics, run.state["progress"], run.state["training"]
    out: list[tuple[str, object, object]] = []
    if metrics.steps:
        total, left = progress["total_steps"], progress["eta_s"]
        of_total = msg("monitor.report.headline.of_total", total=total) if total else ""
        end = (
            ""
            if left is None
            else msg(
                "monitor.report.headline.ends",
                end=units.clock(run.state["time_unix_s"] + left, "%Y-%m-%d %H:%M"),
            )
        )
        out.append(
            (
                msg("monitor.report.headline.steps"),
                f"{metrics.last['step']:,}",
                ", ".join(filter(None, [of_total, end])),
            )
        )
    if metrics.scores and (best := metrics.best(metrics.scores[0])):
        title, unit = titled(metrics.scores[0])
        of_averaged = metric_units.of_averaged(metrics.evaluations.get(best[0], {}))
        averaged = msg("monitor.report.headline.averaged") if of_averaged else ""
        out.append(
            (
                msg("monitor.report.headline.best", title=title[0].lower() + title[1:]),
                decimal(best[1]),
                ", ".join(
                    filter(
                        None,
                        [unit, msg("monitor.report.headline.at_step", step=best[0]), averaged],
                    )
                ),
            )
        )
    if at := ends(run):
        before = msg("monitor.report.headline.from", loss=score_text(at[0]))
        out.append(
            (
                msg("monitor.report.headline.final_loss"),
                score_text(at[1]),
                ", ".join(filter(None, [display(run)[1], before])),
            )
        )
    speed, step = metrics.median(run.counted + metric_units.PER_S), metrics.median("step_ms")
    if speed:
        out.append(
            (
                msg("monitor.report.metric.speed"),
                count(speed),
                _with_energy(
                    msg("monitor.report.headline.per_second_median", unit=run.counted), run
                ),
            )
        )
    if step:
        out.append(
            (
                msg("monitor.report.metric.step_time"),
                milliseconds(step),
                msg("monitor.report.headline.median"),
            )
        )
    peak = metrics.peak("memory_bytes")
    if peak:
        out.append(
            (
                run.memory_word.capitalize(),
                f"{peak / GIB:.2f} GiB" if peak >= GIB else f"{peak / MIB:.0f} MiB",
                msg("monitor.report.headline.largest_rank"),
            )
        )
    elif (mfu := training.get("mfu")) is not None:
        out.append(("MFU", units.percent(100 * mfu), ""))
    elapsed = run.lasted_s
    if elapsed is not None and len(out) < 6:
        note = (
            msg("monitor.report.headline.start_to_end")
            if run.ended
            else msg("monitor.report.headline.so_far")
        )
        out.insert(
            0,
            (
                msg("monitor.report.headline.time"),
                lasted(elapsed),
                msg("monitor.report.headline.in_starts", starts=run.starts)
                if run.pauses and run.starts > 1
                else note,
            ),
        )
    code = whole(run.summary.get("exit_code"))
    if not metrics.steps and code is not None:
        out.append((msg("monitor.report.headline.exit_code"), code, ""))
    return out[:6]
