"""Table of the figures of several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from training.core import metric_units
from training.core.jsonl import number
from training.core.messages import msg
from training.core.units import MIB, count, decimal, milliseconds
from training.monitor.report import chart_types, headline, run_charts
from training.monitor.report.curve import score_text
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import state_name
from training.monitor.report.run import Run


class Figure(NamedTuple):
    """A column: name, value of a run, value as text, whether more is better, and what a value
    refers to: runs that differ in it cannot be compared."""

    title: str
    of: Callable[[Run], float | None]
    shown: Callable[[float], str]
    more: bool | None
    basis: Callable[[Run], object] = lambda run: None


def figures(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """Table of the figures. Marks the best value of each column among the runs of one task, unless
    all are equal."""
    columns: list[Figure] = [
        Figure(
            msg("monitor.report.axis.steps"),
            lambda r: number(r.metrics.last.get("step")),
            lambda v: f"{v:,}",
            None,
        )
    ]
    for key in scores_of(runs):
        title, unit = run_charts.titled(key)
        named = msg("monitor.report.compare.best", title=title[0].lower() + title[1:])
        named = f"{named}, {unit}" if unit else named
        rising = metric_units.higher_is_better(key)
        columns.append(Figure(named, _best(key), decimal, rising, _basis_of_score(key)))
    units = units_of(runs)
    columns += [
        Figure(
            msg("monitor.report.compare.final_loss"), _last_loss, score_text, False, _basis_of_loss
        ),
        *(
            Figure(f"{unit}/s", _median(key), count, True, _basis_of(key))
            for unit in units
            if (key := unit + metric_units.PER_S)
        ),
        Figure(
            msg("monitor.report.compare.step_time"),
            lambda r: r.metrics.median("step_ms"),
            milliseconds,
            False,
        ),
        Figure(
            msg("monitor.report.compare.memory", memory=memory_word(runs)),
            lambda r: r.metrics.peak("memory_bytes"),
            lambda v: f"{v / MIB:,.0f} MiB",
            False,
        ),
        *(Figure(unit, _trained(unit), count, None) for unit in units),
        Figure(msg("monitor.report.axis.time"), lambda r: r.lasted_s, headline.lasted, None),
    ]
    rows: list[list[object]] = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        state = run.state["run"]["state"]
        mark = tag("i", class_="key", style=f"background:{chart_types.swatch(i + 1)}")
        rows.append([join([mark, name]), tag("span", state_name(state), class_=state)])
    head: list[object] = [
        msg("monitor.report.column.run"),
        msg("monitor.report.column.state"),
    ]
    for title, of, shown, more, basis in columns:
        values = [of(run) for run in runs]
        if all(value is None for value in values):
            continue
        best = (
            {}
            if more is None
            else {task: _best_of(runs, values, task, basis, more=more) for task in tasks_of(runs)}
        )
        head.append({"": title, "class_": "n"})
        for row, run, value in zip(rows, runs, values, strict=True):
            known_best = value is not None and value == best.get(run.task)
            row.append(
                {
                    "": "-" if value is None else shown(value),
                    "class_": "n best" if known_best else "n",
                }
            )
    return table(head, rows)


def _best_of(
    runs: Sequence[Run],
    values: Sequence[float | None],
    task: str,
    basis: Callable[[Run], object],
    *,
    more: bool,
) -> float | None:
    """The best finite value of the task's runs; None unless they have several values that can be
    compared."""
    known = [
        (run, value)
        for run, value in zip(runs, values, strict=True)
        if value is not None and run.task == task
    ]
    finite = [value for _, value in known if math.isfinite(value)]
    several = len({value for _, value in known}) > 1
    alike = len({basis(run) for run, _ in known}) == 1
    return (max if more else min)(finite) if finite and several and alike else None


def _density(run: Run) -> float | None:
    return run.state["training"].get("bytes_per_token")


def _basis_of(key: str) -> Callable[[Run], object]:
    return _density if metric_units.is_per_token(key) else lambda run: None


def _basis_of_score(key: str) -> Callable[[Run], object]:
    """A score of other data is that of another problem."""
    of = _basis_of(key)
    return lambda run: (metric_units.data_basis(run.plan, key), of(run))


def _basis_of_loss(run: Run) -> object:
    """Bits per byte are comparable between tokenizers."""
    unit = run_charts.display(run)[1]
    data = metric_units.data_basis(run.plan, "loss")
    return data, unit, None if unit == metric_units.BITS else _density(run)


def scores_of(runs: Sequence[Run]) -> list[str]:
    """Metrics of any run's evaluations, without those of the model's input."""
    keys = dict.fromkeys(key for run in runs for key in run.metrics.scores)
    return [key for key in keys if not metric_units.of_the_input(key, keys)]


def _best(key: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        best = run.metrics.best(key)
        return best[1] if best else None

    return of


def _median(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.metrics.median(key)


def _trained(unit: str) -> Callable[[Run], float | None]:
    return lambda run: number(run.metrics.last.get(unit))


def _last_loss(run: Run) -> float | None:
    at = run_charts.ends(run)
    return at[1] if at else None


def units_of(runs: Sequence[Run]) -> list[str]:
    """What the runs with steps count: tokens, samples."""
    return list(dict.fromkeys(run.counted for run in runs if run.metrics.steps))


def tasks_of(runs: Sequence[Run]) -> list[str]:
    """Tasks of the runs with steps: only runs of the same task are comparable."""
    return list(dict.fromkeys(run.task for run in runs if run.metrics.steps))


def memory_word(runs: Sequence[Run]) -> str:
    """What the memory of their ranks is called."""
    return metric_units.memory_word(all(run.on_gpu for run in runs))
