"""Charts that compare several runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from tests.unit.monitor_runs import Made
from tests.unit.report_runs import planned
from training.monitor.report import charts, compare_page, run, run_charts
from training.monitor.report.chart_types import Chart


def small(*several: Made) -> dict[str, Chart]:
    """The small charts by id."""
    runs = [run.read_run(made.run) for made in several]
    return {one.id: one for one in compare_page._small(runs, [r.name for r in runs]) if one}


def of_losses(folder: Path, **losses: Callable[[int], float]) -> Chart:
    """The chart of the losses of these runs, by name."""
    several = [planned(folder / "experiments" / name) for name in losses]
    for made, loss in zip(several, losses.values(), strict=True):
        for step in range(1, 61):
            made.step(step, loss(step))
    (chart,) = compare_page._losses([run.read_run(made.run) for made in several], [*losses])
    assert chart
    return chart


def top(chart: Chart) -> float:
    """The end of its scale; 0: it shows all values."""
    return chart.spec["layer"][0]["encoding"]["y"]["scale"].get("domainMax", 0.0)


def curve(chart: Chart, of: int) -> list[tuple[int, float | None]]:
    """(step, value) of the rows of one series, or of its marks."""
    rows = zip(*(chart.columns[key] for key in ("series", "step", "y")), strict=True)
    return [(step, y) for series, step, y in rows if series == of]


def test_exact_values_are_not_smoothed(tmp_path: Path) -> None:
    """A running median of a schedule, a counter or a loss scale has values that never were."""
    made = [planned(tmp_path / "experiments" / name) for name in ("a", "b")]
    for step in range(1, 61):
        exact = {"lr": step / 60, "skipped_steps": step // 30, "loss_scale": 2.0 ** (step // 20)}
        for one in made:
            one.step(step, 2.0, **exact)
    assert set(exact) == set(run_charts.EXACT)
    drawn = small(*made)
    for key in exact:
        alone = run.read_run(made[0].run).metrics.curves[key].points
        assert curve(drawn[key], 0) == [(place.step, value) for place, value in alone], key
        assert drawn[key].note == "", key
    assert drawn["grad_norm"].note != ""


def test_evaluations_without_a_finite_value_are_marked_and_not_drawn_across(
    tmp_path: Path,
) -> None:
    made = planned(tmp_path / "experiments" / "nan")
    for step, value in ((10, 3.0), (20, math.nan), (30, 2.0)):
        made.step(step, 2.5)
        made.scores(step, val_loss=value, val_bpb=value, val_psnr=value, val_psnr_input=1.0)
    seen = run.read_run(made.run)
    drawn = {c.id: c for c in (run_charts.loss(seen), *run_charts.small(seen)) if c}
    both = small(made, planned(tmp_path / "experiments" / "other"))
    for chart, number in (
        (drawn["loss"], 1),
        (drawn["val_psnr"], 0),
        (both["val_bpb"], 0),
        (both["val_psnr"], 0),
    ):
        assert curve(chart, number) == [(10, 3.0), (20, None), (30, 2.0)], chart.id
        assert curve(chart, charts.MARK - number) == [(20, None)], chart.id
    assert None not in [y for _, y in curve(drawn["loss"], 0)]


def learns(step: int) -> float:
    return 2 + 6 / step


def diverges(step: int) -> float:
    return learns(step) if step < 30 else 900.0


def linear(first: float, last: float) -> Callable[[int], float]:
    return lambda step: first + (last - first) * step / 60


def test_runs_that_diverge_do_not_flatten_the_losses_of_the_others(tmp_path: Path) -> None:
    """A sweep over learning rates; most of its runs may diverge."""
    for count in (1, 3):
        bad = {f"bad{number}": diverges for number in range(count)}
        chart = of_losses(tmp_path / str(count), good=learns, **bad)
        assert 8 < top(chart) < 12
        assert "▲" in chart.note
        assert curve(chart, charts.BEYOND) == []
        assert curve(chart, charts.BEYOND - 1)[-1] == (60, None)
        assert max(y or 0.0 for _, y in curve(chart, 1)) == 900.0


def test_losses_that_differ_but_do_not_diverge_are_shown_whole(tmp_path: Path) -> None:
    for name, several in {
        "fine-tuned": {"scratch": learns, "tuned": lambda step: 2.0 - step / 100},
        "short": {"scratch": linear(10.2, 6.9), "tuned": linear(3.6, 3.2)},
        "two kinds of loss": {"a": linear(0.5, 0.35), "b": linear(0.05, 0.03)},
        "rising": {"a": lambda step: step / 60, "b": lambda step: step / 50},
        "negative": {"a": lambda step: -step, "b": lambda step: -3.0 * step},
        "alone": {"bad": diverges},
    }.items():
        assert top(of_losses(tmp_path / name, **several)) == 0.0, name


def test_evaluations_of_a_diverged_run_do_not_flatten_the_others(tmp_path: Path) -> None:
    made = [planned(tmp_path / "experiments" / name) for name in ("good", "better", "bad")]
    for of, begin in zip(made, (3.0, 2.5, 1e14), strict=True):
        for step in (10, 20, 30):
            of.step(step, 2.5)
            of.scores(step, val_bpb=begin - step / 100, val_psnr=begin)
    drawn = small(*made)
    assert 3 <= top(drawn["val_bpb"]) < 4 and drawn["val_bpb"].log
    assert [step for step, _ in curve(drawn["val_bpb"], charts.BEYOND - 2)] == [10, 20, 30]
    assert top(drawn["val_psnr"]) == 0.0 and not drawn["val_psnr"].log
