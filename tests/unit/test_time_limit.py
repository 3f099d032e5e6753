"""--max_time, --tokens_per_param and --num_iterations=auto."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.conftest import LAUNCH, ask
from tests.unit.monitor_runs import Made
from tests.unit.own_task import LINE
from tests.unit.trained_runs import gpt, made
from training.config.batch import Batch
from training.config.convert import convert
from training.config.schema import Config
from training.core import manifest, read_backwards, rundir
from training.core.messages import msg
from training.data.duration import UNLIMITED, plan_length
from training.inspector.distributed import World
from training.monitor.state import RunWatch
from training.plan import cli_args, finished, request, training_plan
from training.tasks import optim
from training.tasks.gpt.model_dims import ModelDims
from training.trainer import forecast, time_limit
from training.trainer.time_limit import TimeLimit

WORLD = World(0, 0, 1, torch.device("cpu"), "none", "-")
STEP_S = 2.0


def schedule(
    limit: TimeLimit, slow: Mapping[int, float] | None = None, done: int = 0
) -> list[float]:
    """The share of the peak rate in each step after the first `done` until the last one, of STEP_S
    each. `slow`: seconds of other steps (0-based)."""
    rates, used = list[float](), limit.used_s
    while done + len(rates) < limit.planned:
        step, last = done + len(rates), limit.is_last(evaluates=False)
        rates.append(optim.multiplier(step, limit.total(step), Config()))
        used += (slow or {}).get(step, STEP_S)
        limit.agree(used)
        if last:
            break
    return rates


def test_the_schedule_follows_the_time() -> None:
    limit = TimeLimit(200.0, UNLIMITED)
    rates = schedule(limit)
    assert len(rates) in (99, 100)
    assert 200.0 - 2 * STEP_S <= limit.used_s <= 200.0
    by_steps = [optim.multiplier(step, 100, Config()) for step in range(len(rates))]
    assert rates[5:] == pytest.approx(by_steps[5:], abs=0.03)


def test_the_schedule_follows_the_steps_if_they_are_further() -> None:
    limit = TimeLimit(1e9, 50)
    assert schedule(limit) == [optim.multiplier(step, 50, Config()) for step in range(50)]


def test_rates_never_rise_after_the_warm_up_and_a_slow_step_costs_steps() -> None:
    rates = schedule(TimeLimit(200.0, UNLIMITED), slow={0: 20.0, 30: 60.0})
    assert 50 < len(rates) < 65
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.1


def test_a_first_step_that_compiles_does_not_end_the_warm_up() -> None:
    config = Config(warmup_ratio=0.1)
    for planned in (UNLIMITED, 500):
        limit = TimeLimit(1000.0, planned)
        for step in range(10):
            assert optim.multiplier(step, limit.total(step), config) < 0.3, (planned, step)
            limit.agree(300.0 + step * STEP_S)
    assert limit.is_last(evaluates=False) is False and limit.used_s == 318.0
    assert TimeLimit(200.0, UNLIMITED, used_s=100.0).share == 0.5
    limit.agree(1000.0)
    assert limit.share == 1.0
    limit = TimeLimit(200.0, UNLIMITED)
    limit.agree(250.0)
    assert limit.share == 1.0


def test_an_optimizer_that_compiles_is_not_a_typical_step() -> None:
    """Its first step is between the readings of steps 1 and 2. The clock is read with a lag."""
    for lag in (0, 1):
        limit = TimeLimit(180.0, UNLIMITED, lag=lag)
        for number, used_s in enumerate((60.0, 100.0, 101.0, 102.0), 1):
            limit.agree(used_s)
            step = number + lag
            assert not limit.is_last(evaluates=False), step
            rate = optim.multiplier(step, limit.total(step), Config(warmup_ratio=0.1))
            assert rate < 1, step
        limit.agree(180.0 - lag)
        assert limit.is_last(evaluates=False)


def test_an_evaluation_that_no_longer_fits_is_that_of_the_last_step() -> None:
    limit, used, steps, evaluation_s = TimeLimit(200.0, UNLIMITED), 0.0, 0, 30.0
    while True:
        steps += 1
        evaluates = steps % 10 == 0
        last = limit.is_last(evaluates)
        used += STEP_S + evaluation_s * (steps > 1 and steps % 10 == 1)
        limit.agree(used)
        if last:
            break
        if evaluates:
            limit.evaluated()
    # Step 40 ends after 170 s: its evaluation and another step would take until 202 s.
    assert (steps, used) == (40, 170.0)


def test_an_evaluation_before_the_first_steps_does_not_count_their_compilation() -> None:
    """A resume begins with the evaluation that a stop has prevented."""
    limit, compilation_s, evaluation_s = TimeLimit(150.0, UNLIMITED), 60.0, 10.0
    limit.evaluated()
    used = evaluation_s + compilation_s
    for _ in range(10):
        used += STEP_S
        limit.agree(used)
    assert not limit.is_last(evaluates=True)
    limit.evaluated()
    limit.agree(used + evaluation_s + STEP_S)
    assert not limit.is_last(evaluates=True)
    limit.agree(150.0 - evaluation_s - STEP_S)
    assert limit.is_last(evaluates=True) and not limit.is_last(evaluates=False)


def test_milestones_count_real_steps() -> None:
    limit = TimeLimit(200.0, UNLIMITED, used_s=100.0)
    assert [limit.total(step) for step in (50, 60)] == [100, 120]
    assert TimeLimit(200.0, 80, used_s=100.0).total(50) == 80
    assert TimeLimit(200.0, 80, used_s=100.0).total(0) == 1


def test_a_restart_counts_the_time_used() -> None:
    whole = schedule(TimeLimit(200.0, UNLIMITED))
    rest = schedule(TimeLimit(200.0, UNLIMITED, used_s=100.0), done=50)
    assert len(rest) == pytest.approx(len(whole) / 2, abs=2)
    assert rest[0] == pytest.approx(whole[50], abs=0.02)
    assert rest[-1] == pytest.approx(whole[-1], abs=0.05)
    assert len(schedule(TimeLimit(200.0, UNLIMITED, used_s=300.0), done=50)) == 1


def test_the_time_begins_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    limit = TimeLimit(200.0, UNLIMITED, used_s=7.0)
    clock[0] += 60.0  # a tracker logs in
    limit.start()
    clock[0] += 2.0
    assert limit.now_s() == 9.0


def test_steps_read_late_end_as_early() -> None:
    limit = TimeLimit(100.0, UNLIMITED, lag=1)
    for step in range(1, 48):
        assert not limit.is_last(evaluates=False), step
        limit.agree(step * STEP_S)
    limit.agree(48 * STEP_S)
    assert limit.is_last(evaluates=False)


def test_the_time_used_is_that_of_the_checkpoint_or_of_lost_work(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "used_s": 5.0}, {"step": 2, "used_s": 9.5}, {"step": 2, "val_bpb": 1.0}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "us')

    def used(manifest: Any, limit_s: float = 60.0) -> float | None:
        found = time_limit.begin(limit_s, 10, manifest, metrics, WORLD)
        return found and found.used_s

    assert used({"used_s": 4.0}) == 9.5
    assert used({"used_s": 12.0}) == 12.0
    assert used(None) == 9.5  # ended before its first checkpoint
    assert used({"used_s": 4.0}, limit_s=0.0) is None


def test_the_time_used_is_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait for it: a long run has gigabytes of metrics."""
    metrics, read = tmp_path / "metrics.jsonl", list[object]()
    line = json.dumps({"step": 1, "used_s": 5.0, "loss": [1.0] * 99}) + "\n"
    last = json.dumps({"step": 1, "used_s": 7.0}) + "\n" + json.dumps({"step": 1, "val_bpb": 1.0})
    metrics.write_text(line * (3 * read_backwards.BLOCK // len(line)) + last + "\n")
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(len(text)) or real(text))
    found = time_limit.begin(60.0, 10, None, metrics, WORLD)
    assert found and found.used_s == 7.0
    assert len(read) < 2 * read_backwards.LINES


def test_lengths_with_a_time_limit() -> None:
    batch = Batch(1, 1, 1, 1)
    for given, steps in (
        ({"max_time": 9.0}, UNLIMITED),
        ({"max_time": 9.0, "num_iterations": 70}, 70),
        ({"max_time": 9.0, "num_epochs": 2}, 80),
        ({}, 40),
    ):
        length = plan_length(Config(**given), batch, 40)
        assert length and length.total_steps == steps, given
        assert (length.record()["total_steps"] == 0) == (steps == UNLIMITED)


def test_durations_are_read_from_flags_and_files() -> None:
    for raw, is_text, value in (
        ("8h", True, 28800.0),
        ("1d12h", False, 129600.0),
        (90, False, 90.0),
        ("0", True, 0.0),
    ):
        assert convert("max_time", raw, is_text) == (value, None), raw
    for raw in ("8x", "", "-3", "nan"):
        assert convert("max_time", raw, True)[1] is not None, raw
    assert convert("tokens_per_param", "1e308", True)[1] is not None, "infinitely many tokens"


def look(*args: str) -> cli_args.ParsedArgs:
    return cli_args.parse_args("launch_train.sh", ["1", *args], {})


def test_tokens_for_each_parameter_give_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ("--depth=2", "--tokenizer=bytes", "--total_batch_size=4096", "--max_seq_len=64")
    weights = ModelDims(2, 320, 64).weights
    for args, tokens in (
        (["--num_iterations=auto"], 20),
        (["--tokens_per_param=5"], 5),
        (["--tokens_per_param=5", "--num_iterations=auto"], 5),
    ):
        found = look(*model, *args)
        assert found.problems == []
        steps = found.resolved.config.num_iterations
        assert (steps - 1) * 4096 < tokens * weights <= steps * 4096, args
    config = tmp_path / "c.py"
    config.write_text("tokens_per_param = 5\n")
    found = look(str(config), *model, "--num_iterations=7")
    assert found.problems == []
    assert (found.resolved.config.num_iterations, found.resolved.config.tokens_per_param) == (7, 0)
    config.write_text("num_iterations = 7\n")
    assert look(str(config), *model, "--tokens_per_param=5").resolved.config.num_iterations > 7


def test_tokens_before_a_change_of_the_batch_count(tmp_path: Path) -> None:
    run = made(tmp_path / "run", gpt(1), step=4)
    folder, plan = run.checkpoints / manifest.folder_name(4), json.loads(run.plan.read_text())
    share = 1884 / ModelDims(1, 320, 16).weights
    plan["config"] |= {"total_batch_size": 256, "num_iterations": 8, "tokens_per_param": share}
    rundir.write_json(run.plan, plan)
    (tmp_path / "a.txt").write_text("some text " * 999)
    own = ("1", "--device=cpu", f"--data={tmp_path / 'a.txt'}", "--device_batch_size=1")
    facts: Any = manifest.read(folder)[0]
    del facts["own_sha256"]

    def resumed(size: int, tokens: int) -> request.Request:
        manifest.write(folder, {**facts, "tokens": tokens})
        words = (f"--resume={run.path}", f"--total_batch_size={size}")
        return ask(*own, *words, script=LAUNCH)

    for size, steps, text in ((256, 8, "2,048"), (512, 6, "2,048"), (128, 11, "1,920")):
        found = resumed(size, 1024)
        assert found.config.num_iterations == steps, size
        shown = training_plan.build(found, {})[0]["text"]
        assert any(f"{steps} steps ({text} tokens)" in line for line in shown), shown
    assert resumed(512, 1900).config.num_iterations == 4


def test_lengths_that_cannot_be_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(LINE)
    for args, code in (
        (["--num_iterations=3", "--tokens_per_param=5"], "config.two_lengths"),
        (["--task=line.py", "--num_iterations=auto"], "config.no_parameters"),
    ):
        assert [problem.code for problem in look(*args).problems] == [code], args


def test_a_finished_run_is_prolonged_by_its_own_limit() -> None:
    limits = {"num_iterations": 0, "num_epochs": 0, "max_time": 3600.0}
    assert str(finished.longer(limits, 900)) == "{'max_time': 7200}"
    assert finished.longer(limits | {"max_time": 0.75 * 3}, 900) == {"max_time": 4.5}


def test_the_forecast_takes_the_nearer_end() -> None:
    def left(total: int, limit: TimeLimit | None, used_s: float = 0.0) -> tuple[float, int]:
        session: Any = SimpleNamespace(length=SimpleNamespace(total_steps=total), time_limit=limit)
        made = forecast.Forecast(session)
        # below the number at which it is logged
        for _ in range(forecast.SKIPPED + forecast.MEASURED - 1):
            made.step(30, 500.0, used_s)
        return made.left(30, used_s)

    assert left(130, None) == (50.0, 100)
    assert left(130, TimeLimit(40.0, 130), used_s=15.0) == (25.0, 50)
    assert left(UNLIMITED, TimeLimit(40.0, UNLIMITED), used_s=15.0) == (25.0, 50)


def test_the_cost_of_a_large_run_has_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()
    monkeypatch.setattr(forecast.log, "info", shown.append)
    session: Any = SimpleNamespace(
        length=SimpleNamespace(total_steps=3622),
        time_limit=None,
        world=World(0, 0, 2048, torch.device("cpu"), "none", "-"),
        task=SimpleNamespace(unit="tokens"),
        position=SimpleNamespace(step=0, tokens=0),
        batch=SimpleNamespace(total_tokens=4096),
    )
    made = forecast.Forecast(session)
    for step in range(1, forecast.SKIPPED + forecast.MEASURED + 1):
        made.step(step, 1000.0, 0.0)
    (text,) = shown
    assert msg("trainer.forecast.rank_hours", hours="2,048") in text  # of one hour


def test_the_monitor_expects_the_end_by_the_time(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", config={"num_iterations": 0, "max_time": 400.0}).beats()
    made.supervisor(os.getpid())
    for step in range(1, 21):
        made.step(step, 3.0, at=time.time() - 20 + step, used_s=5.0 * step)
    progress = RunWatch(made.run).read()["progress"]
    assert progress["total_steps"] is None
    assert progress["percent"] == pytest.approx(25.0)
    assert progress["eta_s"] == pytest.approx(300.0, abs=30)
