"""metrics.jsonl as the monitor reads it: repeated steps, incomplete lines, long files, NaN."""

from __future__ import annotations

import json
import math
import os

import pytest

from tests.unit.monitor_runs import Made, look, text_of
from training.core import json_text, jsonl, rundir
from training.monitor import history, run_figures, state
from training.monitor.report import plan_sections, run


def test_the_last_record_of_a_step_wins(made: Made) -> None:
    made.steps(100)  # evaluations at 50 (2.5) and 100 (2.0)
    for step in range(81, 91):
        made.step(step, 9.0)
    seen = look(made.run)
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (90, 9.0)
    assert (seen["training"]["eval_best"], seen["training"]["eval_best_step"]) == (2.5, 50)
    curve = seen["loss_curve"]["points"]
    assert [p["step"] for p in curve] == list(range(1, 91)) and all(
        p["loss"] == 9.0 for p in curve[80:]
    )


def test_the_first_step_does_not_count_for_the_speed(made: Made) -> None:
    """As in summary.json, in `./duet runs` and in the report."""
    watch = state.RunWatch(made.run)
    for step, ms in ((1, 9000.0), (2, 100.0), (3, 120.0)):
        made.step(step, 3.0, step_ms=ms, tokens_per_s=1e6 / ms, compute_ms=[ms], mfu=None)
        if step == 1:
            assert watch.read()["training"]["step_ms_median"] == 9000
    seen = watch.read()
    figures = seen["training"]
    assert (figures["step_ms_median"], figures["step_ms_p95"]) == (110, 120)
    assert figures["tokens_per_s"] == pytest.approx((1e6 / 100 + 1e6 / 120) / 2)
    assert run.read_run(made.run).metrics.median("step_ms") == figures["step_ms_median"]


def test_incomplete_line_is_read_once_complete(made: Made) -> None:
    made.steps(10)
    watch = state.RunWatch(made.run)
    with made.run.metrics.open("a") as file:
        file.write('{"step": 11, "lo')
        file.flush()
        assert watch.read()["progress"]["step"] == 10
        file.write('ss": 1.5}\n')
    seen = watch.read()
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (11, 1.5)


def test_truncated_file_is_read_from_its_start(made: Made) -> None:
    watch = state.RunWatch(made.steps(50).run)
    assert watch.read()["progress"]["step"] == 50
    made.run.metrics.write_text("")
    made.step(1, 5.0)
    assert [p["step"] for p in watch.read()["loss_curve"]["points"]] == [1]


def write_metrics(made: Made, best: int) -> None:
    """20,000 steps, evaluated every 500; the evaluation at step `best` is the best one."""
    lines = []
    for step in range(1, 20_001):
        loss = 2 + 3 * math.exp(-step / 3000)
        time = made.at + step * 0.001
        lines.append({"time": time, "step": step, "loss": loss, "step_ms": step % 97})
        if step % 500 == 0:
            lines.append({"step": step, "val_loss": 1.0, "val_bpb": 2 + abs(step - best) / 1e5})
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_long_file_is_sampled_without_losing_evaluations(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(made, best=7500)
    size = made.run.metrics.stat().st_size
    assert size > jsonl.WHOLE
    skimmed = state.RunWatch(made.run)
    quick = skimmed.read()
    monkeypatch.setattr(jsonl, "WHOLE", 10 * size)
    full = look(made.run)
    assert (quick["training"], quick["progress"]["step"]) == (full["training"], 20_000)
    assert quick["training"]["eval_best_step"] == 7500
    assert quick["loss_curve"]["points"][0]["step"] < 200
    quick_values, full_values = (
        [p["loss"] for p in seen["loss_curve"]["points"]] for seen in (quick, full)
    )
    assert len(quick_values) == len(full_values) == run_figures.CURVE_POINTS
    assert quick_values == pytest.approx(full_values, rel=0.02)
    made.step(20_001, 1.0)  # later lines are read one by one
    assert skimmed.read()["progress"]["step"] == 20_001


def test_the_pace_of_a_long_file_is_that_of_its_last_steps(made: Made) -> None:
    at, lines = made.at - 5000, []
    for step in range(1, 20_001):
        at += 0.1 if step <= 18_000 else 0.3
        lines.append({"time": at, "step": step, "loss": 3.0, "compute_ms": [33.123] * 64})
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert made.run.metrics.stat().st_size > jsonl.WHOLE
    read = history.History(made.run.metrics)
    read.update()
    assert read.seconds_per_step(0.0) == pytest.approx(0.3)


def test_very_long_file_is_searched_in_pieces(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(made, best=1500)
    whole = look(made.run)
    for name, size in (
        ("WHOLE", 1 << 14),
        ("END", 1 << 13),
        ("SEARCHED", 1 << 16),
        ("BLOCK", 1 << 15),
    ):
        monkeypatch.setattr(jsonl, name, size)
    watch = state.RunWatch(made.run)
    first = watch.read()
    assert first["progress"] == whole["progress"] | {"elapsed_s": first["progress"]["elapsed_s"]}
    assert (
        first["training"]["eval_best_step"] > 1500
        and first["loss_curve"]["points"][0]["step"] < 200
    )
    reads = 1
    while (seen := watch.read())["training"]["eval_best_step"] != 1500:
        reads += 1
        assert reads < 100
    assert reads > 5
    while not watch._history._tail.searched:
        seen = watch.read()
    # none is lost at the border of two pieces
    assert sorted(watch._history.evaluations) == list(range(500, 20_001, 500))
    assert seen["training"] == whole["training"] == state.RunWatch(made.run).read_all()["training"]


def test_a_resume_without_a_number_of_steps_has_none(made: Made) -> None:
    """It ends by --max_time; the first start announced 400 steps."""
    made.supervisor(os.getpid()).steps(100)
    made.run.data.unlink()
    rundir.write_json(made.run.plan, made.plan | {"config": {"max_time": 7200.0}})
    for total, epochs in ((400, 1), (0, 0)):
        length = {"total_steps": total, "steps_per_epoch": 400, "epochs": epochs}
        rundir.append_json(made.run.events, {"event": "start", "time": made.at, **length})
    found = look(made.run)["progress"]
    assert (found["step"], found["total_steps"], found["epochs"]) == (100, None, None)
    rundir.write_json(made.run.data, {"total_steps": 0, "steps_per_epoch": 400, "epochs": 0})
    shown = str(plan_sections.data(run.read_run(made.run)))
    assert ">400<" in shown and ">0<" not in shown


def test_nan_loss_is_shown_and_is_null_in_json(made: Made) -> None:
    made.supervisor(os.getpid()).steps(40)
    made.step(41, math.nan, grad_norm=math.inf)
    seen = look(made.run)
    assert "loss nan" in text_of(made.run) and "×" in text_of(made.run)
    strict = json.loads(json.dumps(json_text.finite(seen), allow_nan=False))
    assert (strict["training"]["loss"], strict["training"]["loss_is_finite"]) == (None, False)
