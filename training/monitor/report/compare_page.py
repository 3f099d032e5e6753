"""Page that compares several runs: figures, differences, curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from training.config.schema import of_the_run
from training.core import metric_units
from training.core.check_names import check_title
from training.core.jsonl import dig, text
from training.core.messages import msg
from training.core.units import GIB
from training.monitor import run_settings
from training.monitor.report import (
    chart_types,
    charts,
    compare_figures,
    plan_sections,
    run_charts,
    scale_top,
    sections,
)
from training.monitor.report.chart_types import DOTS, LINE, Chart, Series
from training.monitor.report.curve import Curve
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import ReportPage, code
from training.monitor.report.page import names as legend
from training.monitor.report.run import Run

CHANGING = ("host memory",)  # checks whose facts change from moment to moment


def page(runs: Sequence[Run]) -> ReportPage:
    names = _names(runs)
    out = ReportPage(
        msg("monitor.report.compare.page_title", runs=len(runs)),
        _head(runs, names),
        pauses=any(run.pauses for run in runs),
    )
    out.counted = common_unit(runs)
    out.add("figures", msg("monitor.report.title.figures"), compare_figures.figures(runs, names))
    out.add(
        "differences",
        msg("monitor.report.title.config_differences"),
        _differences(runs, names),
        short=msg("monitor.report.title.differences_short"),
    )
    add_curves(out, runs, names)
    add_machines(out, runs, names)
    add_failures(out, runs, names)
    return out


def common_unit(runs: Sequence[Run]) -> str | None:
    """What all runs count; None if they differ."""
    units = compare_figures.units_of(runs)
    return units[0] if len(units) == 1 else None


def add_curves(out: ReportPage, runs: Sequence[Run], names: Sequence[str]) -> None:
    drawn = out.figures([*_losses(runs, names), *_small(runs, names)])
    if not drawn:
        return
    hint = msg("monitor.report.compare.hint")
    runs_shown = legend([(name, i + 1) for i, name in enumerate(names)], "data-name")
    title = msg("monitor.report.title.curves")
    out.add("curves", title, tag("p", hint, class_="hint"), runs_shown, drawn)


def add_machines(out: ReportPage, runs: Sequence[Run], names: Sequence[str]) -> None:
    out.add(
        "machines",
        msg("monitor.report.title.machine_differences"),
        _environments(runs, names),
        short=msg("monitor.report.title.machines_short"),
    )


def add_failures(out: ReportPage, runs: Sequence[Run], names: Sequence[str]) -> None:
    failed = [
        (name, sections.failure(run)) for name, run in zip(names, runs, strict=True) if run.failure
    ]
    out.add(
        "failures",
        msg("monitor.report.title.failures"),
        *(join([tag("h3", name), card]) for name, card in failed),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of the runs; folders where several runs share a name."""
    names = [run.name for run in runs]
    return [
        str(run.folder.path) if names.count(name) > 1 else name
        for run, name in zip(runs, names, strict=True)
    ]


def _head(runs: Sequence[Run], names: Sequence[str]) -> Html:
    running = [name for run, name in zip(runs, names, strict=True) if not run.ended]
    empty = [name for run, name in zip(runs, names, strict=True) if not run.metrics.steps]
    return join(
        [
            tag("h1", msg("monitor.report.compare.heading", runs=len(runs))),
            tag(
                "p",
                msg("monitor.report.compare.still_running", running=", ".join(running)),
                class_="notice",
            )
            if running
            else None,
            tag(
                "p",
                msg("monitor.report.compare.no_curves", empty=", ".join(empty)),
                class_="notice",
            )
            if empty
            else None,
        ]
    )


def _losses(runs: Sequence[Run], names: Sequence[str]) -> list[Chart | None]:
    """One chart for each task."""
    tasks = compare_figures.tasks_of(runs)
    return [
        _loss(
            runs,
            names,
            task,
            msg("monitor.report.compare.loss_of", task=task)
            if len(tasks) > 1
            else msg("monitor.report.charts.loss"),
        )
        for task in tasks
    ]


def _loss(runs: Sequence[Run], names: Sequence[str], task: str, title: str) -> Chart | None:
    units = {run_charts.display(run)[1] for run in runs if run.metrics.steps and run.task == task}
    unit = units.pop() if len(units) == 1 else ""
    series = _each(
        runs,
        names,
        lambda run: (
            run_charts.losses(run) if run.task == task and "loss" in run.metrics.curves else None
        ),
        ends=True,
    )
    notes = [msg("monitor.report.compare.running_median")]
    for one, run in zip(series, runs, strict=True):
        if run.task != task:
            continue
        bad, failed = run.metrics.curves.get("loss", Curve()).marks, run_charts.failure_mark(run)
        one.marks = [*bad, *([failed] if failed else [])]
        marked = [msg("monitor.report.compare.not_finite", step=bad[0][0].step)] if bad else []
        marked += (
            [msg("monitor.report.compare.failed_at", cause=failed[1], step=failed[0].step)]
            if failed
            else []
        )
        notes += (
            [msg("monitor.report.compare.marked", name=one.name, marked=", ".join(marked))]
            if marked
            else []
        )
    return charts.lines(
        "loss",
        title,
        series,
        unit=unit,
        note=chart_types.joined(notes),
        wide=True,
        log=True,
        named=False,
        top=scale_top.of_runs(series),
    )


def _small(runs: Sequence[Run], names: Sequence[str]) -> list[Chart | None]:
    out: list[Chart | None] = []
    for key in compare_figures.scores_of(runs):
        title, unit = run_charts.titled(key)
        note = run_charts.direction(key)
        curves = [run.metrics.evaluation(key) for run in runs]
        points = [
            Series(n, i + 1, DOTS, c.points, c.marks)
            for i, (c, n) in enumerate(zip(curves, names, strict=True))
        ]
        # where higher is better, a run that diverges is far below the others
        top = None if metric_units.higher_is_better(key) else scale_top.of_runs(points)
        out.append(
            charts.lines(
                key,
                title,
                points,
                unit=unit,
                note=note,
                named=False,
                log=top is not None,
                top=top,
            )
        )
    keys = dict.fromkeys(key for run in runs for key in run.metrics.curves if key != "loss")
    for key in sorted(keys, key=run_charts.order):
        title, unit = run_charts.titled(key)
        smooth = key not in run_charts.EXACT
        series = _each(runs, names, partial(_curve, key), ends=False, smooth=smooth)
        form, log, note = (
            run_charts.FORMS.get(key, ""),
            key in run_charts.LOG,
            msg("monitor.report.compare.running_median") if smooth else "",
        )
        out.append(
            charts.lines(
                key, title, series, unit=unit, note=note, named=False, form=form, log=log, calm=log
            )
        )
    return [*out, _memory(runs, names)]


def _curve(key: str, run: Run) -> Curve | None:
    return run.metrics.curves.get(key)


def _each(
    runs: Sequence[Run],
    names: Sequence[str],
    of: Callable[[Run], Curve | None],
    *,
    ends: bool,
    smooth: bool = True,
) -> list[Series]:
    curves = [of(run) or Curve() for run in runs]
    return [
        Series(n, i + 1, LINE, (smooth and c.smoothed(ends=ends)) or c.points)
        for i, (c, n) in enumerate(zip(curves, names, strict=True))
    ]


def _memory(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """Memory of the largest rank of each run."""
    series = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        curves = [curve for curve in run.metrics.by_rank.get("memory_bytes", []) if curve.extent]
        most = max(
            curves, key=lambda curve: curve.extent[1] if curve.extent else 0.0, default=Curve()
        )
        series.append(
            Series(name, i + 1, LINE, [(place, value / GIB) for place, value in most.points])
        )
    return charts.lines(
        "memory",
        compare_figures.memory_word(runs).capitalize(),
        series,
        unit="GiB",
        note=msg("monitor.report.compare.largest_rank"),
        named=False,
    )


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Html:
    configs = [run.settings for run in runs]
    fields = dict.fromkeys(field for config in configs for field in config if field != "run_name")
    rows: list[list[object]] = []
    for field in sorted(
        fields, key=lambda name: (any(name not in config for config in configs), not _trains(name))
    ):
        values = [config.get(field, "-") for config in configs]
        if run_settings.differ(field, configs):
            rows.append(
                [
                    field,
                    *(_value(run, field, value) for run, value in zip(runs, values, strict=True)),
                ]
            )
    return (
        table([msg("monitor.report.column.field"), *names], rows)
        if rows
        else tag("p", msg("monitor.report.compare.no_differences"))
    )


def _trains(field: str) -> bool:
    try:
        return of_the_run(field)
    except KeyError:  # of another version
        return True


def _value(run: Run, field: str, value: object) -> dict[str, object]:
    origin = text(dig(run.plan, "origins", field))
    return {
        "": code(plan_sections.plain(value)),
        "class_": "from" if origin == "default" else None,
        "title": origin,
    }


def _environments(runs: Sequence[Run], names: Sequence[str]) -> Html:
    known = [plan_sections.facts(run) for run in runs]
    rows, left_out = [], {check_title(name) for name in CHANGING}
    for fact in dict.fromkeys(fact for facts in known for fact in facts if fact not in left_out):
        values = [facts.get(fact, "-") for facts in known]
        if len(set(values)) > 1:
            rows.append([fact, *values])
    return (
        table(["", *names], rows)
        if rows
        else tag("p", msg("monitor.report.compare.no_machine_differences"))
    )
