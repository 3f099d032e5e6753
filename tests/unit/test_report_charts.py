"""Charts of one run: marks, scales, the timeline with restarts, slow ranks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.report_runs import event, page_of, planned, read, trained
from training.core import metric_units, rundir
from training.monitor import launches
from training.monitor.report import (
    chart_render,
    chart_types,
    charts,
    page,
    run,
    run_charts,
    run_page,
    sections,
    series,
    timeline,
)
from training.monitor.report.curve import PointPosition


@pytest.fixture
def whole(tmp_path: Path) -> Made:
    return trained(planned(tmp_path / "experiments" / "quick"), pace=1.6)


def test_program_of_the_page_has_its_numbers_and_labels_from_the_charts(whole: Made) -> None:
    record = json.loads(
        re.findall(r'<script type="application/json" id="charts">(.+?)</script>', page_of(whole))[0]
    )[0]
    assert (record["mark"], record["beyond"]) == (charts.MARK, charts.BEYOND)
    assert charts.OF_STEP.endswith(record["plain_label"])
    source = Path(page.__file__).with_name("page.js").read_text(encoding="utf-8")
    assert "datum.value" not in source and str(charts.MARK) not in source


def test_non_finite_losses_are_marked(whole: Made) -> None:
    whole.step(121, float("nan"))
    whole.step(122, float("inf"))
    page = page_of(whole)
    assert "2 steps without a finite loss (×)" in page
    stored = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    assert stored
    (loss,) = [chart for chart in json.loads(stored[1]) if chart["id"] == "loss"]
    assert [
        s
        for s, n in zip(loss["columns"]["step"], loss["columns"]["series"], strict=True)
        if n == -1
    ] == [121, 122]


def test_a_chart_without_a_finite_value_has_no_zoom(tmp_path: Path) -> None:
    """The browser found no scale for it: an error instead of the chart."""
    made = planned(tmp_path / "experiments" / "quick")
    for step in range(1, 4):
        made.step(step, float("nan"))
    chart = loss_of(made)
    assert marked(chart, charts.NO_NUMBER) == [1, 2, 3]
    assert not any("params" in layer for layer in chart.spec["layer"])
    made.step(4, 2.0)
    assert loss_of(made).spec["layer"][0]["params"] == [charts.zoom()]


def test_restarts_on_the_timeline(whole: Made) -> None:
    event(whole, "failure", 15.0, cause="hang", rank=0, text="no step")
    event(
        whole,
        "restart",
        15.1,
        attempt=2,
        seconds_lost=3.0,
        text="hang at step 100: restarted from step 80",
    )
    event(whole, "start", 20.0, step=80, total_steps=400, world_size=2)
    event(whole, "recovered", 21.0, attempt=2, step=81, seconds=9.0)
    seen = timeline.timeline_chart(run.read_run(whole.run))
    assert seen
    rows = list(zip(*(seen.columns[key] for key in ("lane", "kind")), strict=True))
    assert {lane for lane, _ in rows} >= {
        "start 1",
        "start 2",
        "restarts",
        "failures",
        "checkpoints",
    }
    assert {
        ("start 1", "training"),
        ("start 1", "evaluation"),
        ("start 2", "start-up"),
        ("start 2", "training"),
    } <= {*rows}
    assert "restarted from step 80" in page_of(whole)


def test_ranks_that_differ_most_are_shown(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "many", ranks=40)
    for step in range(1, 61):
        made.step(
            step, 2.0, compute_ms=[90.0 if rank == 17 else 40 + rank / 100 for rank in range(40)]
        )
    chart = run_charts.balance(run.read_run(made.run))
    assert chart and len(chart.legend) == run_charts.RANKS and "rank 17" in dict(chart.legend)
    assert "the 8 of 40 ranks that differ most" in chart.note
    assert "Rank 17 is slow" in read(page_of(made)).text


def test_the_balance_is_that_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Three ranks until step 30, then two with more work each; the first was slow before."""
    made = planned(tmp_path / "experiments" / "fewer", ranks=2)
    for step in range(1, 61):
        times = [90.0, 40.0, 40.0] if step <= 30 else [60.0, 61.0]
        made.step(step, 2.0, compute_ms=times, memory_bytes=[1 << 20] * len(times))
    event(made, "start", 1.0, step=0, world_size=3)
    event(made, "start", 3.0, step=30, world_size=2)
    seen = run.read_run(made.run)
    assert run_charts.own_times(seen) == [60.0, 61.0]
    chart = run_charts.balance(seen)
    assert chart and [name for name, _ in chart.legend] == ["rank 0", "rank 1"]
    table = str(run_page._balance(seen))
    assert "rank 1" in table and "rank 2" not in table and "is slow" not in table


def loss_of(made: Made) -> chart_types.Chart:
    chart = run_charts.loss(run.read_run(made.run))
    assert chart
    return chart


def marked(chart: chart_types.Chart, of: int) -> list[int]:
    return [
        step
        for step, series in zip(chart.columns["step"], chart.columns["series"], strict=True)
        if series == of
    ]


def test_the_final_loss_of_a_long_run_without_a_summary(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "died")
    losses = [2.0 + (9.0 if step % 4 == 0 else 0.0) for step in range(1, 4001)]
    for step, loss in enumerate(losses, 1):
        made.step(step, loss)
    assert run_charts.ends(run.read_run(made.run)) == pytest.approx(metric_units.ends(losses))


def test_many_checkpoints_hide_no_start_and_no_failure(tmp_path: Path) -> None:
    """Three starts two pauses apart; the second one was killed, so its last checkpoint is its
    end."""
    made = planned(tmp_path / "experiments" / "long")
    day, events = 86400.0, []

    def add(kind: str, after_s: float, /, **facts: Any) -> None:
        events.append({"time": made.at + after_s, "event": kind, **facts})

    add("start", 1 - 2 * day, step=0, world_size=2)
    add("failure", 8 - 2 * day, cause="hang", rank=0, text="no step for 5 s")
    add("restart", 9 - 2 * day, attempt=2, seconds_lost=1.0, text="restarted from step 0")
    add("start", 12 - 2 * day, step=0, world_size=2)
    add("end", 20 - 2 * day, step=10, exit_code=75)
    add("resume", 1 - day, step=10)
    add("start", 2 - day, step=10, world_size=2)
    add("checkpoint", 9 - day, step=20, path="x")
    add("checkpoint", 12 - day, step=30, path="x")
    add("resume", 1.0, step=30)
    add("start", 2.0, step=30, world_size=2)
    before = len(events)
    for number in range(7000):
        add("checkpoint", 2 + number / 100, step=31 + number, path="x")
    made.run.events.write_text("".join(json.dumps(one) + "\n" for one in events))

    seen = run.read_run(made.run)
    assert seen.starts == 4 and seen.begun == pytest.approx(made.at + 1 - 2 * day)
    assert [pytest.approx((since - made.at, until - made.at)) for since, until in seen.pauses] == [
        (20 - 2 * day, 1 - day),
        (12 - day, 0.0),
    ]
    times = [one["time"] for one in seen.events]
    assert times == sorted(times) and len(times) < before + launches.MOST_OTHERS
    assert len(seen.events) + seen.left_out.total() == len(events)
    chart = timeline.timeline_chart(seen)
    assert chart and {"failures", "restarts", "pauses", "start 4"} <= {*chart.columns["lane"]}
    assert f"{7000 + 2 + 2 + 2 - timeline.MARKS} earlier events are not shown" in chart.note
    text = read(str(sections.events(seen))).text
    assert "no step for 5 s" in text and "all 7011 events, the last 400 shown" in text


def test_a_page_shows_some_of_thousands_of_evaluations(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "long")
    event(made, "start", 1.0, step=0, total_steps=400, world_size=2)
    count = series.POINTS + 100
    with made.run.metrics.open("a") as file:
        for step in range(1, count + 1):
            time = made.at + 2 + step / 100
            score = {"val_bpb": math.nan if step > count - 300 else 3.0 + step % 7, "eval_ms": 1.0}
            score |= {"val_loss": 3.0 + step % 7}
            for facts in ({"loss": 2.0}, score):
                file.write(json.dumps({"time": time, "step": step, "epoch": 1, **facts}) + "\n")
    seen = run.read_run(made.run)
    dots = marked(loss_of(made), 2)
    assert series.POINTS / 2 < len(dots) <= series.POINTS
    assert len(seen.metrics.evaluation("val_bpb").marks) == series.MARKS
    chart = timeline.timeline_chart(seen)
    shown = chart.columns["kind"].count("evaluation") if chart else 0
    assert timeline.MARKS / 2 < shown <= timeline.MARKS
    assert chart and str(count - shown) in chart.note.split()


def test_notable_events_left_out_are_counted_with_their_file(tmp_path: Path) -> None:
    """Both those that the table cuts and those that were not read."""
    made = planned(tmp_path / "experiments" / "warned")
    first, beyond = sections.EVENTS, 11

    def notes(count: int) -> list[str]:
        warning = {"time": made.at, "event": "warning", "text": "slow"}
        made.run.events.write_text(f"{json.dumps(warning)}\n" * count)
        page = read(str(sections.events(run.read_run(made.run))))
        return [part for part in page.parts if made.run.events.name in part]

    assert notes(first) == []
    for count in (first + beyond, launches.MOST_OTHERS + beyond):
        above, of_all = notes(count)
        assert str(count - first) in above.split() and str(count) in of_all.split()


def test_failed_step_is_on_the_loss_curve(whole: Made) -> None:
    facts = {
        "cause": "nan_loss",
        "rank": 1,
        "summary": "loss is nan",
        "step": 121,
        "time": whole.at + 20,
    }
    rundir.write_json(whole.run.failure, facts)
    chart = loss_of(whole)
    assert marked(chart, charts.NO_NUMBER) == [121] and "× at step 121: nan_loss" in chart.note


def test_spike_does_not_flatten_the_loss(whole: Made) -> None:
    assert "▲" not in loss_of(whole).note, "a high start is not a spike"
    whole.step(121, 40.0)
    for step in range(122, 130):
        whole.step(step, 2.0)
    chart = loss_of(whole)
    assert "▲: above 5" in chart.note and 121 in marked(chart, charts.BEYOND)


def test_the_top_of_a_scale_has_all_digits_before_the_point(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "fp16")
    for step in range(1, 61):
        made.step(step, 2.0, loss_scale=65536.0 if step == 1 else 16384.0)
    (chart,) = [c for c in run_charts.small(run.read_run(made.run)) if c and c.id == "loss_scale"]
    assert chart.note.split()[-1] == "22938"


def test_tiny_and_huge_values_have_short_labels() -> None:
    """Those of gradients that vanish were cut to zeros."""
    for size, form, short in (
        (1e-44, "", True),
        (3e-5, "", True),
        (1e30, "~s", True),
        (0.002, "", False),
        (4e8, "~s", False),
        (0.0, "", False),
    ):
        places = [PointPosition(step, float(step), None) for step in (1, 2, 3)]
        points = [(place, size * place.step) for place in places]
        one = chart_types.Series("a", 1, chart_types.LINE, points)
        chart = charts.lines("a", "a", [one], form=form)
        assert chart is not None
        axis = chart.spec["layer"][0]["encoding"]["y"]["axis"]
        assert axis.get("format", "") == (charts.EXPONENT if short else form)
        if short and chart_render.available():
            labels = re.findall(r">([^<>]*e[+−-]\d+)<", chart_render.picture(chart))
            assert len(set(labels)) == len(labels) > 1


def test_a_logarithmic_scale_is_offered_for_values_that_it_shows(tmp_path: Path) -> None:
    for name, losses, offered in (
        ("likelihood", (-1.0, -2.0), False),
        ("zero", (0.0, 0.0), False),
        ("nan", (math.nan, math.nan), False),
        ("both", (1.0, -2.0), True),
    ):
        made = planned(tmp_path / "experiments" / name)
        for step, loss in enumerate(losses, 1):
            made.step(step, loss)
        assert loss_of(made).log == offered, name


def test_axis_of_a_single_value_shows_it(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "one")
    made.step(1, 3.5054)
    (layer,) = loss_of(made).spec["layer"]
    assert layer["encoding"]["y"]["scale"]["domain"] == pytest.approx([3.435, 3.575], abs=0.001)


@pytest.mark.parametrize(
    ("pace", "text"),
    [
        (1.4, "No rank is slow: the slowest, rank 1, takes 40 % longer"),
        (1.02, "The ranks are balanced"),
    ],
)
def test_chance_does_not_make_a_rank_slow(tmp_path: Path, pace: float, text: str) -> None:
    assert (
        text in read(page_of(trained(planned(tmp_path / "experiments" / "even"), pace=pace))).text
    )


def test_few_steps_make_no_rank_slow(tmp_path: Path) -> None:
    assert (
        "Too few steps (fewer than 50) to call a rank slow"
        in read(page_of(trained(planned(tmp_path / "experiments" / "few"), 10, pace=3.0))).text
    )


@pytest.mark.parametrize("steps", [60, 12])
def test_energy_of_the_first_step_is_above_the_scale(tmp_path: Path, steps: int) -> None:
    """The GPUs wait for the compilation in it."""
    made = planned(tmp_path / "experiments" / "energy")
    for step in range(1, steps + 1):
        made.step(step, 2.0, joules_per_unit=24.0 if step == 1 else 1.0 + step % 10 / 10)
    (chart,) = [c for c in run_charts.small(run.read_run(made.run)) if c and "joules" in c.id]
    assert chart.unit == "J/token" and marked(chart, charts.BEYOND) == [1]
    top = chart.spec["layer"][0]["encoding"]["y"]["scale"]["domainMax"]
    assert 1.9 < top < 3


def test_axes_of_a_short_run(tmp_path: Path) -> None:
    """No label between two steps, a count of 0 on its axis from 0, whole dots at the edge."""
    made = planned(tmp_path / "experiments" / "short")
    for step in (1, 2, 3):
        made.step(step, 4.0 - step, skipped_steps=0)
    made.score(1, 3.0)
    small = {chart.id: chart for chart in run_charts.small(run.read_run(made.run)) if chart}
    skipped = small["skipped_steps"]
    assert skipped.spec["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, 1]
    if chart_render.available():
        labels = re.findall(r"<text[^>]*>([123])<", chart_render.picture(skipped))
        assert labels[:3] == ["1", "2", "3"] and "2" not in labels[3:]
    for layer in loss_of(made).spec["layer"]:
        assert layer["encoding"]["y"].get("value") or layer["encoding"]["y"]["scale"]["padding"] > 0


def test_long_phases_are_in_minutes(whole: Made) -> None:
    of = run.read_run(whole.run)
    of.durations = {0: {"forward": 600.0, "backward": 300.0}, 1: {"forward": 60.0}}
    chart = run_charts.phases(of)
    assert chart and chart.spec["encoding"]["x"]["axis"]["title"] == "minutes"
    assert sorted(chart.columns["y"]) == [1.0, 5.0, 10.0]
