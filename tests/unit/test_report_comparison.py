"""Charts that compare several runs."""

from __future__ import annotations

from pathlib import Path

from tests.unit.monitor_runs import Made
from tests.unit.report_runs import planned
from training.monitor.report import compare_page, run, run_charts
from training.monitor.report.chart_types import Chart


def small(*several: Made) -> dict[str, Chart]:
    """The small charts by id."""
    runs = [run.read_run(made.run) for made in several]
    return {one.id: one for one in compare_page._small(runs, [r.name for r in runs]) if one}


def test_exact_values_are_not_smoothed(tmp_path: Path) -> None:
    """A running median of a schedule, a counter or a loss scale has values that never were."""
    made = [planned(tmp_path / "experiments" / name) for name in ("a", "b")]
    for step in range(1, 61):
        exact = {"lr": step / 60, "skipped_steps": step // 30, "loss_scale": 2.0 ** (step // 20)}
        for one in made:
            one.step(step, 2.0, **exact)
    assert set(exact) == set(run_charts.EXACT)
    charts = small(*made)
    for key in exact:
        alone = run.read_run(made[0].run).metrics.curves[key].points
        shown = [
            y
            for y, of in zip(*(charts[key].columns[c] for c in ("y", "series")), strict=True)
            if of == 0
        ]
        assert shown == [value for _, value in alone], key
        assert charts[key].note == "", key
    assert charts["grad_norm"].note != ""
