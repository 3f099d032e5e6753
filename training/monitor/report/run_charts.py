"""Charts of one run."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

from training.core import heartbeat, metric_units, units
from training.core.jsonl import number, whole
from training.core.messages import msg
from training.core.units import GIB, MIB, decimal
from training.monitor.launches import clock
from training.monitor.report import charts, scale_top
from training.monitor.report.chart_types import DOTS, LINE, Chart, Series, joined
from training.monitor.report.curve import Curve, PointPosition
from training.monitor.report.run import Run
from training.monitor.report.series import Metrics

RANKS = 8  # curves of ranks in one chart, at most
PARTS = 8  # kinds of phases in one bar, including "other"
BARS = 64  # ranks, at most
OTHER = "other"
KNOWN = (
    *("step_ms", "lr", "grad_norm", "mfu", "loss_scale", "skipped_steps"),
    *("joules_per_unit", "power_w", "used_s"),
    *("val_loss", "val_bpb"),
)  # metrics with a title
EXACT = ("lr", "loss_scale", "skipped_steps")  # a running median has values that never were
FORMS = {"tokens_per_s": "~s", "lr": "~g"}
LOG = ("grad_norm", "step_ms", "loss_scale")
CALM = (*LOG, "joules_per_unit")  # whose first steps, or spikes, are far above all others


def _titles(counted: str | None) -> dict[str, tuple[str, str]]:
    """(title, unit) of the metrics of KNOWN."""
    return {
        "step_ms": (msg("monitor.report.metric.step_time"), "ms"),
        "lr": (msg("monitor.report.metric.learning_rate"), ""),
        "grad_norm": (msg("monitor.report.metric.grad_norm"), ""),
        "mfu": (msg("monitor.report.metric.mfu"), msg("monitor.report.metric.share_of_peak")),
        "loss_scale": (msg("monitor.report.metric.loss_scale"), ""),
        "skipped_steps": (msg("monitor.report.metric.skipped_steps"), ""),
        "joules_per_unit": (msg("monitor.report.metric.energy"), f"J/{metric_units.one(counted)}"),
        "power_w": (msg("monitor.report.metric.power"), "W"),
        "used_s": (msg("monitor.report.metric.used"), "s"),
        "val_loss": (msg("monitor.report.metric.val_loss"), ""),
        "val_bpb": (msg("monitor.report.metric.validation"), "bits/byte"),
    }


def titled(key: str, counted: str | None = None) -> tuple[str, str]:
    """(title, unit) of a metric; `counted`: what the run counts."""
    if key.endswith(metric_units.PER_S):
        return msg("monitor.report.metric.speed"), f"{key.removesuffix(metric_units.PER_S)}/s"
    if key in KNOWN or not key.startswith(metric_units.EVALUATION):
        return _titles(counted).get(key, (key, ""))
    return msg(
        "monitor.report.metric.validation_of", name=metric_units.plain(key)
    ), metric_units.score_unit(key) or ""


def order(key: str) -> int:
    """Position of a metric's chart among the others."""
    return (
        -1 if key.endswith(metric_units.PER_S) else KNOWN.index(key) if key in KNOWN else len(KNOWN)
    )


def direction(key: str) -> str:
    """Note on which values are better; empty for well-known metrics."""
    return (
        ""
        if key in KNOWN
        else msg("monitor.report.metric.higher_is_better")
        if metric_units.higher_is_better(key)
        else msg("monitor.report.metric.lower_is_better")
    )


def display(run: Run) -> tuple[float, str]:
    """(factor for recorded losses, unit of the product). A user script's loss keeps its unit, even
    if the script counts tokens."""
    if run.script:
        return 1.0, run.state["training"]["loss_unit"] or ""
    factor, unit = metric_units.display(
        run.metrics.last | {"bytes_per_token": run.state["training"].get("bytes_per_token")}
    )
    return factor, unit or ""


def losses(run: Run) -> Curve:
    """Loss curve in the unit of `display`."""
    curve, (factor, _) = run.metrics.curves.get("loss", Curve()), display(run)
    points, means = (
        [(place, value * factor) for place, value in of if math.isfinite(value * factor)]
        for of in (curve.points, curve.means)
    )
    return replace(curve, points=points, means=means)


def ends(run: Run) -> tuple[float, float] | None:
    """(first, last) loss, each a mean of some steps: from the summary, or from the steps if it has
    none."""
    factor, _ = display(run)
    recorded = [number(run.summary.get(f"loss_{which}")) for which in ("begin", "end")]
    resumed = run.metrics.resumed
    of_earlier = resumed is not None and resumed.discards_end(run.summary)
    if recorded[0] is not None and recorded[1] is not None and not of_earlier:
        return recorded[0] * factor, recorded[1] * factor
    first, last = run.metrics.ends() or (None, None)
    return None if first is None or last is None else (first * factor, last * factor)


def loss(run: Run) -> Chart | None:
    metrics = run.metrics
    curve, unit = losses(run), display(run)[1]
    series = charts.raw_and_smooth("loss", curve)
    checked = metrics.evaluation("val_bpb" if unit == metric_units.BITS else "val_loss")
    name = msg("monitor.report.charts.validation")
    series.append(Series(name, 2, DOTS, checked.points, checked.marks))
    notes = []
    if curve.window:
        notes.append(
            msg("monitor.report.charts.smoothed_over", steps=curve.window * metrics.stretch)
        )
    if metrics.stretch > 1:
        notes.append(msg("monitor.report.charts.extremes", steps=metrics.stretch))
    if curve.bad:
        notes.append(msg("monitor.report.charts.not_finite", steps=units.plural(curve.bad, "step")))
    marks = list(curve.marks)
    if failed := failure_mark(run):
        marks.append(failed)
        notes.append(msg("monitor.report.charts.failed_at", step=failed[0].step, cause=failed[1]))
    note, top = joined(notes), scale_top.of_spikes(curve)
    return charts.lines(
        "loss",
        msg("monitor.report.charts.loss"),
        series,
        unit=unit,
        note=note,
        marks=marks,
        wide=True,
        log=True,
        top=top,
    )


def failure_mark(run: Run) -> tuple[PointPosition, str] | None:
    """Position and cause of the failure; the failed step is not in metrics.jsonl."""
    step, last = whole(run.failure.get("step")), whole(run.metrics.last.get("step"))
    if (
        run.script
        or step is None
        or not last
        or step in (place.step for place, _ in run.metrics.curves.get("loss", Curve()).marks)
    ):
        return None
    failed = clock(run.failure)
    at = run.since(failed + run.ahead_s if failed else clock(run.metrics.last))
    place = PointPosition(step, at, run.metrics.so_far(step))
    return place, str(run.failure.get("cause") or "failure")


def small(run: Run) -> list[Chart | None]:
    """Charts of evaluations, speed, memory, learning rate, and all other metrics of the steps."""
    metrics = run.metrics
    out: list[Chart | None] = []
    for key in metrics.scores:
        if key != metric_units.PLAIN and not metric_units.of_the_input(key, metrics.scores):
            out.append(_score(key, metrics))
    out.append(memory(run))
    first = (run.counted + metric_units.PER_S, *KNOWN)
    others = sorted(key for key in metrics.curves if key not in (*first, "loss"))
    for key in (*first, *others):
        if (curve := metrics.curves.get(key)) is None:
            continue
        title, unit = titled(key, run.counted)
        series = (
            [Series(title, 1, LINE, curve.points)]
            if key in EXACT
            else charts.raw_and_smooth(title, curve, ends=False)
        )
        form = FORMS.get(key, "")
        out.append(
            charts.lines(
                key,
                title,
                series,
                unit=unit,
                named=False,
                marks=curve.marks,
                form=form,
                log=key in LOG,
                calm=key in CALM,
            )
        )
    return out


def _score(key: str, metrics: Metrics) -> Chart | None:
    """Chart of an evaluation metric, with that of the model's input, if recorded."""
    (title, unit), curve, best = titled(key), metrics.evaluation(key), metrics.best(key)
    given = metrics.evaluation(key + metric_units.INPUT).points
    name = metric_units.plain(key) if given else title
    series = [Series(name, 2, DOTS, curve.points, curve.marks)]
    if given:
        series.append(Series(msg("monitor.report.charts.input"), 0, LINE, given))
    note = (
        msg("monitor.report.charts.best_at", value=decimal(best[1]), step=best[0]) if best else ""
    )
    if note and (good := direction(key)):
        note = msg("monitor.report.charts.best_direction", best=note, direction=good)
    return charts.lines(key, title, series, unit=unit, note=note)


def memory(run: Run) -> Chart | None:
    of_ranks, peak = run.metrics.by_rank.get("memory_bytes", []), run.metrics.peak("memory_bytes")
    if peak is None:
        return None
    unit, size = ("GiB", GIB) if peak >= GIB else ("MiB", MIB)
    scaled = [[(place, value / size) for place, value in curve.points] for curve in of_ranks]
    gpu = (
        msg("monitor.report.charts.gpu_memory")
        if run.on_gpu
        else msg("monitor.report.charts.resident_memory")
    )
    shown = _some([points[-1][1] if points else 0.0 for points in scaled])
    series = [
        Series(msg("monitor.report.rank", rank=rank), i + 1, LINE, scaled[rank])
        for i, rank in enumerate(shown)
    ]
    return charts.lines(
        "memory",
        msg("monitor.report.charts.memory_per_rank", memory=run.memory_word.capitalize()),
        series,
        unit=unit,
        note=joined([gpu, _left_out(shown, of_ranks)]),
    )


def _some(values: list[float]) -> list[int]:
    """Ranks that a chart shows: all, or those furthest from the median."""
    middle = statistics.median(values) if values else 0.0
    far = sorted(range(len(values)), key=lambda rank: -abs(values[rank] - middle))
    return sorted(far[:RANKS])


def _left_out(shown: list[int], all_: list[Curve]) -> str:
    return (
        msg("monitor.report.charts.ranks_left_out", shown=len(shown), total=len(all_))
        if len(shown) < len(all_)
        else ""
    )


def own_times(run: Run) -> list[float | None]:
    """Median compute time of each rank, ms. With another number of ranks each has other work, and
    maybe another GPU: only the steps since the last change of it count."""
    starts = [event for event in run.events if event["event"] == "start"]
    changes = (
        whole(now.get("step"))
        for before, now in pairwise(starts)
        if now.get("world_size") != before.get("world_size")
    )
    *_, since = (0, *filter(None, changes))
    return [_median(curve, since) for curve in _compute_times(run)]


def _median(curve: Curve, since: int) -> float | None:
    """The median after this step, or of everything if nothing is later."""
    values = [value for _, value in curve.means]
    recent = [value for place, value in curve.means if place.step > since]
    return statistics.median(recent or values) if values else None


def _compute_times(run: Run) -> list[Curve]:
    """Curves of the ranks of the last start; earlier ones may have had more."""
    return run.metrics.by_rank.get("compute_ms", [])[: whole(run.plan.get("ranks"))]


def balance(run: Run) -> Chart | None:
    """Chart of the ranks' compute times."""
    of_ranks = _compute_times(run)
    if not of_ranks:
        return None
    shown = _some([value or 0.0 for value in own_times(run)])
    series = [
        Series(msg("monitor.report.rank", rank=rank), i + 1, LINE, _calm(of_ranks[rank]))
        for i, rank in enumerate(shown)
    ]
    note = joined(
        [
            msg("monitor.report.charts.compute_note"),
            _left_out(shown, of_ranks),
        ]
    )
    return charts.lines(
        "balance",
        msg("monitor.report.charts.compute_title"),
        series,
        unit="ms",
        note=note,
        wide=True,
        zero=True,
        calm=True,
    )


def _calm(curve: Curve) -> list[tuple[PointPosition, float]]:
    return curve.smoothed(ends=False) or curve.points


def phases(run: Run) -> Chart | None:
    """Chart of the ranks' time by phase, from the histograms of their heartbeats."""
    if not run.durations:
        return None
    totals: dict[str, float] = {}
    for seconds in run.durations.values():
        for kind, amount in seconds.items():
            totals[kind] = totals.get(kind, 0.0) + amount
    known = [kind for kind in heartbeat.STEP_PHASES if totals.get(kind)]
    largest = sorted(totals, key=lambda kind: -totals[kind])
    kept = [kind for kind in largest if kind != OTHER][: PARTS - 1]
    parts = [*(k for k in known if k in kept), *(k for k in kept if k not in known), OTHER]
    ranks, names = sorted(run.durations)[:BARS], {OTHER: msg("monitor.report.charts.other_phases")}
    longest = max(sum(run.durations[rank].values()) for rank in ranks)
    units = (
        (3600, msg("monitor.report.axis.hours")),
        (60, msg("monitor.report.axis.minutes")),
        (1, msg("monitor.report.axis.seconds")),
    )
    unit_s, unit = next(one for one in units if longest >= 2 * one[0] or one[0] == 1)
    rows = []
    for rank in ranks:
        seconds = run.durations[rank]
        amounts = {kind: seconds.get(kind, 0.0) for kind in parts[:-1]}
        amounts[OTHER] = sum(seconds.values()) - sum(amounts.values())
        rows += [
            (msg("monitor.report.rank", rank=rank), kind, round(amount / unit_s, 4))
            for kind, amount in amounts.items()
            if amount > 0
        ]
    note = joined(
        [
            msg("monitor.report.charts.phases_note"),
            msg("monitor.report.charts.first_ranks", ranks=BARS)
            if len(ranks) < len(run.durations)
            else "",
        ]
    )
    shown = [names.get(part, part) for part in parts if any(row[1] == part for row in rows)]
    rows = [(bar, names.get(part, part), amount) for bar, part, amount in rows]
    return charts.stacked(
        "phases",
        msg("monitor.report.charts.phases_title"),
        rows,
        shown,
        unit=unit,
        note=note,
    )
