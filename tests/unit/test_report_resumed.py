"""Reports of runs that were resumed or killed, or whose clock was set back: time, steps, pauses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.report_runs import event, page_of, planned, read
from tests.unit.test_report_charts import loss_of
from training.core import jsonl, rundir
from training.core.units import duration
from training.launcher import notification
from training.monitor import launches, state
from training.monitor.report import (
    run,
    run_charts,
    sections,
    timeline,
)
from training.monitor.runs import facts


@pytest.fixture
def resumed(tmp_path: Path) -> Made:
    """Two starts three days apart: steps 1 to 40, then 41 to 80 with their own plan."""
    made = planned(tmp_path / "experiments" / "resumed", resume=True)
    days, begun = 72 * 3600, made.at - 72 * 3600
    event(made, "start", 1.0 - days, step=0, total_steps=80, world_size=2)
    for step in range(1, 41):
        made.step(step, 3.0 - step / 100, at=begun + 2 + step / 10)
    event(made, "end", 7.0 - days, step=40, exit_code=5)
    event(made, "resume", 3.0, step=40)
    event(made, "start", 4.0, step=40, total_steps=80, world_size=2)
    for step in range(41, 81):
        made.step(step, 3.0 - step / 100, at=made.at + 4 + (step - 40) / 10)
    event(made, "end", 9.0, step=80, exit_code=0)
    rundir.write_json(
        made.run.summary, {"status": "done", "exit_code": 0, "steps": 80, "time": made.at + 9.0}
    )
    return made


def test_times_of_a_resumed_run_exclude_the_pause(resumed: Made) -> None:
    seen = run.read_run(resumed.run)
    assert seen.begun == pytest.approx(resumed.at - 72 * 3600 + 1) and seen.starts == 2
    assert seen.pauses == [pytest.approx((resumed.at - 72 * 3600 + 7, resumed.at))]
    assert seen.lasted_s == pytest.approx(6 + 9)
    assert facts.read(resumed.run.path).seconds == pytest.approx(6 + 9)
    assert seen.state["progress"]["elapsed_s"] == pytest.approx(6 + 9)
    text = read(page_of(resumed)).text
    first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.begun))
    assert (
        f"started {first} · took 0:15 min without pauses · 2 starts" in text
        and "in 2 starts, without pauses" in text
    )
    assert max(loss_of(resumed).columns["time"]) == pytest.approx(6 + 8, abs=0.1)
    chart = timeline.timeline_chart(seen)
    assert chart and "15 in total without pauses" in chart.note
    ends = [to * 1.0 for to in chart.columns["to"] if to is not None]
    assert max(ends) == pytest.approx(15, abs=0.1), "seconds, not days"
    bars = dict(
        zip(
            zip(chart.columns["lane"], chart.columns["kind"], strict=True),
            chart.columns["lasts"],
            strict=True,
        )
    )
    assert bars["start 2", "start-up"] == pytest.approx(4, abs=0.1), (
        "from its launch, not from the end of the first"
    )
    assert "not running for 2 d 23:59 h" in chart.columns["text"]


def test_the_speed_is_that_of_the_last_start(tmp_path: Path) -> None:
    """The one before had a GPU."""
    made = planned(tmp_path / "run")
    event(made, "start", 1.0, step=0, total_steps=80, world_size=2)
    for step in range(1, 41):
        made.step(step, 2.0, step_ms=9.0, joules_per_unit=0.1)
    event(made, "start", 6.0, step=40, total_steps=80, world_size=2)
    for last, step_ms, joules in ((40, 9.0, 0.1), (41, 9.0, 0.1), (80, 300.0, None)):
        for step in range(41, last + 1):
            made.step(step, 2.0, step_ms=500.0 if step == 41 else 300.0, at=made.at + 7)
        metrics = run.read_run(made.run).metrics
        assert (metrics.median("step_ms"), metrics.median("joules_per_unit")) == (step_ms, joules)


def test_times_of_the_events_table_exclude_the_pause(resumed: Made) -> None:
    cells = read(str(sections.events(run.read_run(resumed.run)))).parts
    ends = [i for i, cell in enumerate(cells) if cell == "end"]
    assert [cells[i - 1] for i in ends] == [duration(6), duration(6 + 9)]


def test_killed_start_leaves_a_pause_but_a_restart_does_not(resumed: Made) -> None:
    lines = [
        line
        for line in resumed.run.events.read_text().splitlines()
        if '"step": 40, "exit_code"' not in line
    ]
    resumed.run.events.write_text("\n".join(lines) + "\n")
    ((since, until),) = run.read_run(resumed.run).pauses
    assert since == pytest.approx(resumed.at - 72 * 3600 + 6) and until == pytest.approx(resumed.at)
    assert facts.read(resumed.run.path).seconds == pytest.approx(5 + 9)
    at = [(1.0, "start"), (60.0, "failure"), (90.0, "restart"), (200.0, "start")]
    assert (
        launches.pauses([{"time": when, "event": kind} for when, kind in at], [2.0, 59.0], 0.5)
        == []
    )


def test_the_last_event_of_a_killed_start_may_be_of_any_kind() -> None:
    """The machine dies after it, and the run is resumed the next morning; the ranks take 9 s."""
    night = [(1100.0, 31100.0)]
    begun: list[tuple[float, str]] = [(1000.0, "start")]
    for kind in ("checkpoint", "warning", "verdict", "shards", "recovered", "restart", "start"):
        killed = [*begun, (1100.0, kind)]
        for launched in (31100.0, None):
            again = [(31109.0 if launched else 31100.0, "resume"), (31118.0, "start")]
            if kind == "restart" and not launched:
                continue  # by the supervisor, as far as known
            events: list[jsonl.Record] = [{"time": at, "event": of} for at, of in (*killed, *again)]
            assert launches.pauses(events, [1099.0], launched, 1000.0) == night, (kind, launched)
    at = [*begun, (1100.0, "restart"), (1110.0, "warning"), (1120.0, "resume"), (1130.0, "start")]
    events = [{"time": when, "event": kind} for when, kind in at]
    assert launches.pauses(events, [1099.0], 1000.0, 1000.0) == []
    events.insert(2, {"time": 1109.0, "event": "warning"})
    assert launches.pauses(events, [1099.0], 1000.0, 1000.0) == []


def test_an_evaluation_that_a_resume_has_discarded_is_not_the_best(tmp_path: Path) -> None:
    """Resumed from step 40 and ended before a new step, then trained to step 80 again."""
    made = planned(tmp_path / "experiments" / "back")
    event(made, "start", 1.0, step=0, total_steps=120, world_size=2)
    for step in range(1, 121):
        made.step(step, 2.0)
        if step % 40 == 0:
            made.score(step, 3.0 - step / 100)
            event(made, "eval", 16 + step / 10, step=step, val_bpb=3.0 - step / 100)
    event(made, "resume", 40.0, step=40)
    assert run.read_run(made.run).metrics.best("val_bpb") == (40, 2.6)
    made.score(80, 2.5)
    event(made, "eval", 50.0, step=80, val_bpb=2.5)
    assert run.read_run(made.run).metrics.best("val_bpb") == (80, 2.5)


def test_steps_that_a_resume_has_discarded_are_in_no_view(tmp_path: Path) -> None:
    """Resumed from step 40 of 120 and ended before a new step, then trained to step 41."""
    made = planned(tmp_path / "experiments" / "back")
    event(made, "start", 1.0, step=0, total_steps=400, world_size=2)
    for step in range(1, 121):
        made.step(step, 3.0 - step / 100, at=made.at + 2 + step / 10)
    made.summary(steps=120, loss_begin=3.0, loss_end=1.8, time=made.at + 15)
    watch = state.RunWatch(made.run)
    assert watch.read()["progress"]["step"] == facts.read(made.run.path).step == 120
    event(made, "resume", 40.0, step=40)

    def check(step: int) -> None:
        loss = 3.0 - step / 100
        for seen in (watch.read(), state.RunWatch(made.run).read(), run.read_run(made.run).state):
            assert (seen["progress"]["step"], seen["training"]["loss"]) == (step, loss)
            assert [point["step"] for point in seen["loss_curve"]["points"]][-1] == step
        listed, page = facts.read(made.run.path), run.read_run(made.run)
        assert (listed.step, listed.loss) == (step, loss)
        assert page.metrics.last["step"] == page.metrics.steps == step
        assert loss_of(made).columns["step"][-1] == step
        assert run_charts.ends(page) == pytest.approx((2.985, loss + 0.005))
        assert notification.payload(made.run, made.plan, 4, begun=True)["loss"] == loss

    check(40)
    made.step(41, 3.0 - 41 / 100, at=made.at + 41)
    check(41)


def test_a_clock_set_back_to_before_the_start(tmp_path: Path) -> None:
    """An hour in the middle of a run: its end is before its start, and no pause."""
    made = planned(tmp_path / "experiments" / "back")
    hour = 3600.0
    event(made, "start", 1.0, step=0, total_steps=80, world_size=2)
    for step in range(1, 81):
        made.step(step, 2.0, at=made.at + 2 + step / 10 - (hour if step > 40 else 0.0))
    event(made, "checkpoint", 9.9 - hour, step=80, path="x")
    event(made, "end", 10.0 - hour, step=80, exit_code=0)
    made.summary(time=made.at + 10 - hour)
    seen = run.read_run(made.run)
    assert seen.pauses == [] and seen.lasted_s == pytest.approx(6.0)
    chart = timeline.timeline_chart(seen)
    assert chart and [*zip(chart.columns["lane"], chart.columns["kind"], strict=True)] == [
        ("start 1", "start-up"), ("start 1", "training"), ("checkpoints", "")
    ]  # fmt: skip
    assert min(at for at in chart.columns["at"] if at is not None) == 0.0
    assert max(to for to in chart.columns["to"] if to is not None) == pytest.approx(6.0)


def test_a_clock_set_back_between_two_starts(resumed: Made) -> None:
    """By three days and a minute: the second start is planned before the first one."""
    minute, days = 60.0, 72 * 3600
    for file in (resumed.run.events, resumed.run.metrics):
        records = list(rundir.read_records(file))
        for record in records:
            if record["time"] > resumed.at:
                record["time"] -= days + minute
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    launched = resumed.at - days - minute
    rundir.write_json(resumed.run.plan, {**resumed.plan, "created": launched})
    resumed.summary(steps=80, time=launched + 9.0)
    seen = run.read_run(resumed.run)
    assert seen.begun == pytest.approx(resumed.at - days + 1) and seen.pauses == []
    assert seen.lasted_s == pytest.approx(6 + 9)
    assert seen.state["progress"]["elapsed_s"] == pytest.approx(6 + 9)
    assert facts.read(resumed.run.path).seconds == pytest.approx(6 + 9)
    times = [place.time_s for place, _ in seen.metrics.curves["loss"].points]
    assert times == sorted(times) and times[0] == pytest.approx(1.1)
    assert times[-1] == pytest.approx(6 + 8, abs=0.1)
    chart = timeline.timeline_chart(seen)
    assert chart
    bars = [(at, to) for at, to in zip(chart.columns["at"], chart.columns["to"], strict=True) if to]
    assert bars == sorted(bars) and bars[-1] == (pytest.approx(6 + 4), pytest.approx(6 + 9))
    assert seen.metrics.back_s == pytest.approx(minute + 7)
    text = read(str(sections.events(seen))).text
    assert time.strftime("%H:%M:%S", time.localtime(launched + 4)) in text


def test_the_time_of_a_run_that_was_killed_ends_with_its_last_step(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "killed", resume=True)
    event(made, "start", -4000.0, step=0)
    event(made, "resume", 1.0, step=900)
    for step in range(1000):
        made.step(step, 2.0, at=made.at - 4000 + step)
        made.step(step + 900, 2.0, at=made.at + 2 + step)
    lines = made.run.metrics.read_text().splitlines()
    made.run.metrics.write_text("\n".join(sorted(lines)) + "\n")
    assert made.run.metrics.stat().st_size > 3 * launches.BLOCK
    rundir.write_json(made.run.summary, {"status": "done", "time": made.at + 1005})
    assert facts.read(made.run.path).seconds == pytest.approx(999 + 1005)
    assert run.read_run(made.run).lasted_s == pytest.approx(999 + 1005)
