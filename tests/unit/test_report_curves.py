"""Curves of metrics.jsonl: exact for a short run, extremes and marks for a long one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import Made
from training.core import metric_units, read_backwards
from training.core.rundir import append_json
from training.monitor.report.series import POINTS, Metrics


def written(path: Path, records: list[dict[str, Any]]) -> Metrics:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Metrics(path)


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "time": 1000.0 + number,
        "step": number,
        "epoch": 1,
        "loss": loss,
        "tokens": number * 64,
        **more,
    }


def steps_of(metrics: Metrics, key: str = "loss") -> list[int]:
    return [place.step for place, _ in metrics.curves[key].points]


def test_short_run_is_exact(made: Made) -> None:
    made.steps(100)
    metrics = Metrics(made.run.metrics, made.at)
    loss = metrics.curves["loss"].points
    assert [place.step for place, _ in loss] == list(range(1, 101))
    assert loss[49][1] == 2 + 3 * math.exp(-50 / 30)
    assert loss[49][0].tokens == 50 * 4096 and loss[49][0].time_s == pytest.approx(
        made.first_step - made.at + 5, abs=0.01
    )
    assert (metrics.steps, metrics.stretch, metrics.last["step"], metrics.first["step"]) == (
        100,
        1,
        100,
        1,
    )
    assert metrics.best("val_bpb") == (100, 2.0)
    assert metrics.median("step_ms") == 105, "the first step, 101, is left out as in summary.json"


def test_medians_of_whole_numbers(tmp_path: Path) -> None:
    times: list[Any] = [900, 100, 101.0, 102, 103.0, math.nan, True, "x", 10**400]
    rows = [step(n, step_ms=value) for n, value in enumerate(times, 1)]
    assert written(tmp_path / "m.jsonl", rows).median("step_ms") == 101.5, "the first is left out"


def test_long_run_keeps_its_extremes(tmp_path: Path) -> None:
    chance = random.Random(3)
    losses = {n: 2 + chance.random() for n in range(1, 20_001)}
    losses |= {7_777: 91.0, 12_345: -4.0, 15_000: math.nan, 15_001: math.inf}
    metrics = written(tmp_path / "m.jsonl", [step(n, loss) for n, loss in losses.items()])
    curve = metrics.curves["loss"]
    assert len(curve.points) <= POINTS and metrics.steps == 20_000
    values = {place.step: value for place, value in curve.points}
    assert values[7_777] == 91.0 and values[12_345] == -4.0, "spikes must not vanish"
    assert all(losses[number] == value for number, value in values.items()), (
        "every point is a recorded value"
    )
    assert curve.bad == 2 and {place.step // 100 for place, _ in curve.marks} == {150}
    assert curve.marks[0][1] == "NaN"
    assert list(values) == sorted(values)
    assert len(curve.smoothed()) == len(curve.means) <= POINTS // 2 + 1


def test_values_whose_sum_is_infinite(tmp_path: Path) -> None:
    huge = 1.7e308
    metrics = written(tmp_path / "m.jsonl", [step(n, huge) for n in range(1, 5_001)])
    curve = metrics.curves["loss"]
    assert curve.bad == 0 and {value for _, value in curve.points} == {huge}
    assert all(value == pytest.approx(huge) for _, value in curve.means)


def test_the_ends_of_a_loss_are_means_of_steps(tmp_path: Path) -> None:
    """Not of the extremes that a long curve keeps: one in three losses is far from the others."""
    for count in (3, 100, POINTS + 1, 10_000):
        losses = [3.0 - n / count + (6.0 if n % 3 == 0 else 0.0) for n in range(1, count + 1)]
        rows = [step(n, loss) for n, loss in enumerate(losses, 1)]
        first, last = written(tmp_path / "m.jsonl", rows).ends() or (0.0, 0.0)
        assert (first, last) == pytest.approx(metric_units.ends(losses), abs=1e-9), count
    assert Metrics(tmp_path / "none.jsonl").ends() is None


@pytest.mark.parametrize("count", [40, 4 * POINTS])
def test_evaluations_after_a_resume_with_another_batch(tmp_path: Path, count: int) -> None:
    """64 tokens a step, then 192; the failed step after the last one has as many again."""
    half, rows = count // 2, list[dict[str, Any]]()
    tokens = [64 * n if n <= half else 64 * half + 192 * (n - half) for n in range(count + 2)]
    for n in range(1, count + 1):
        rows.append(step(n) | {"tokens": tokens[n]})
        if n % 10 == 0:
            rows.append({"time": 1000.0 + n, "step": n, "val_bpb": 1.0})
    metrics = written(tmp_path / "m.jsonl", rows)
    seen = [place.tokens for place, _ in metrics.evaluation("val_bpb").points]
    assert seen == tokens[10 : count + 1 : 10]
    assert metrics.so_far(count + 1) == tokens[count + 1]


def test_evaluations_between_logged_steps(tmp_path: Path) -> None:
    rows = [step(10), {"step": 15, "val_loss": 1.0}, step(20)]
    metrics = written(tmp_path / "m.jsonl", [{"step": 5, "val_loss": 1.0}, *rows])
    assert [place.tokens for place, _ in metrics.evaluation("val_loss").points] == [320, 960]


def test_later_records_win(tmp_path: Path) -> None:
    first = [step(n, 5.0) for n in range(1, 31)] + [
        {"time": 1.0, "step": 30, "val_bpb": 9.0, "eval_ms": 1.0}
    ]
    again = [step(n, 1.0) for n in range(21, 26)] + [{"time": 2.0, "step": 20, "val_bpb": 0.1}]
    metrics = written(tmp_path / "m.jsonl", [*first, *again])
    assert steps_of(metrics) == list(range(1, 26))
    assert {value for place, value in metrics.curves["loss"].points if place.step > 20} == {1.0}
    assert list(metrics.evaluations) == [20], "replaced evaluations are dropped"


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    good = [json.dumps(step(n)).encode() for n in range(1, 6)]
    path.write_bytes(
        b"\n".join(
            [
                good[0],
                b'{"time": 1, "st',
                good[1],
                b"\xff\xfe\x00",
                b"[1, 2]",
                b"null",
                good[2],
                b"",
                good[3],
                good[4][:30],
            ]
        )
    )
    assert steps_of(Metrics(path)) == [1, 2, 3, 4]


def test_values_of_any_kind(tmp_path: Path) -> None:
    odd = [
        step(1, None),
        step(2, 1.0, lr="fast"),
        step(4, 10**400),
        {"step": "5", "loss": 1.0},
        step(6, 2.0, note={"a": 1}),
    ]
    metrics = written(tmp_path / "m.jsonl", odd)
    assert metrics.curves["loss"].points[0][1] == 1.0 and steps_of(metrics) == [2, 6]
    assert set(metrics.curves) == {"loss"}


def test_lists_have_one_curve_per_rank(tmp_path: Path) -> None:
    rows = [
        step(n, compute_ms=[10.0 + n, 20.0], memory_bytes=[None, 5e8]) for n in range(1, 40)
    ] + [step(40, compute_ms=[50.0, 20.0, 7.0])]
    metrics = written(tmp_path / "m.jsonl", rows)
    assert [len(curve.points) for curve in metrics.by_rank["compute_ms"]] == [40, 40, 1]
    assert metrics.peak("memory_bytes") == 5e8 and not metrics.by_rank["memory_bytes"][0].points


def test_clock_set_back(tmp_path: Path) -> None:
    rows = [step(n) | {"time": 1000.0 + n - (500 if n > 5 else 0)} for n in range(1, 11)]
    metrics = written(tmp_path / "m.jsonl", rows)
    times = [place.time_s for place, _ in metrics.curves["loss"].points]
    assert times == sorted(times) and min(times) >= 0
    assert metrics.back_s == pytest.approx(499)


def test_the_smoothed_curve(tmp_path: Path) -> None:
    rows = [step(n, 100.0 if n in (1, 50) else 2.0) for n in range(1, 101)]
    curve = written(tmp_path / "m.jsonl", rows).curves["loss"]
    assert curve.window == 5
    assert [value for _, value in curve.smoothed()] == [100.0] + [2.0] * 99, (
        "it starts at the first value and hides a spike"
    )
    assert {value for _, value in curve.smoothed(ends=False)} == {2.0}


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_blocks_of_any_size_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    path = tmp_path / "m.jsonl"
    for n in range(1, 50):
        append_json(path, step(n, n / 3))
    whole = Metrics(path).curves["loss"].points
    monkeypatch.setattr(read_backwards, "BLOCK", block)
    if block == 7:  # lines longer than four blocks are dropped
        assert Metrics(path).steps == 0
    else:
        assert Metrics(path).curves["loss"].points == whole


def test_missing_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "none.jsonl")
    assert (metrics.steps, metrics.curves, metrics.scores) == (0, {}, [])


def test_higher_is_better_for_some_scores(tmp_path: Path) -> None:
    rows = [
        step(1),
        *(
            {"time": 1.0, "step": n, "val_loss": 1.0 / n, "val_psnr": v}
            for n, v in ((1, 30.0), (2, 33.0), (3, 31.0))
        ),
    ]
    metrics = written(tmp_path / "m.jsonl", [rows[0], rows[1], step(2), rows[2], step(3), rows[3]])
    assert metrics.scores == ["val_psnr", "val_loss"]
    assert metrics.best("val_psnr") == (2, 33.0) and metrics.best("val_loss") == (3, 1.0 / 3)
