"""The scaling check after the measurement: what counts of a run, verdicts, what limits it, the
report."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from training.cli.scaling import analysis, measure, render
from training.cli.scaling import experiment as experiments
from training.cli.scaling.experiment import Experiment
from training.cli.scaling.measure import RankLayout, Sizes, StepTime
from training.core.rundir import RunDir, append_json, write_json

EXPERIMENT = Experiment(
    config="my.py",
    args=("my.py", "--device=cpu"),
    ranks=(1, 2),
    steps=40,
    rounds=3,
    device="cpu",
    device_reason="as asked",
    precision="fp32",
    sequences=16,
    seq_len=128,
    accumulation=2,
    cores=2,
)


# Reading runs


def write_run(folder: Path, first_end: float, step_ms: float, steps: int) -> list[StepTime]:
    run = RunDir(folder)
    run.path.mkdir()
    for step in range(1, steps + 1):
        slow = 900.0 if step <= experiments.WARM_UP_STEPS else step_ms
        append_json(
            run.metrics,
            {"time": first_end + step * step_ms / 1000, "step": step, "loss": 1.0, "step_ms": slow},
        )
        append_json(run.metrics, {"time": 0.0, "step": step, "val_loss": 1.0})
    return measure.steps(run)


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    read = write_run(tmp_path / "run", 100.0, 10.0, 12)
    assert [s.ms for s in read] == [10.0] * 7
    assert measure.steps(RunDir(tmp_path / "none")) == []


def test_runs_apart_count_while_all_of_them_train(tmp_path: Path) -> None:
    early, late = (
        write_run(tmp_path / "a", 100.0, 10.0, 45),
        write_run(tmp_path / "b", 100.1, 10.0, 45),
    )
    assert measure.lateness([early, late]) == pytest.approx(0.1)
    shared = measure.together([early, late], 40)
    assert [len(run) for run in shared] == [30, 30]
    assert shared[0][0].end_s == pytest.approx(shared[1][0].end_s)
    assert measure.together([early, write_run(tmp_path / "c", 100.3, 10.0, 45)], 40) == [], (
        "hardly at the same time"
    )
    assert measure.together([early, []], 40) == []


def test_a_failed_run_shows_its_card_or_its_output(tmp_path: Path) -> None:
    run, console = RunDir(tmp_path), tmp_path / "console"
    assert measure.what_happened(run, console) == ""
    console.write_text("[INFO] one\n[ERROR] 2026-11-21 the data is too small\n    allowed: more\n")
    assert (
        measure.what_happened(run, console)
        == "    │ [ERROR] 2026-11-21 the data is too small\n    │     allowed: more"
    )
    record = {
        "cause": "nan_loss",
        "summary": "loss is nan",
        "rank": 1,
        "phase": "step 5: forward",
        "where": None,
        "phases": {},
    }
    write_json(
        run.failure,
        record
        | {
            "evidence": [],
            "advice": ["lower it"],
            "log": "x",
            "waiting": {},
            "stacks": None,
            "kind": "error",
        },
    )
    assert "nan_loss: the loss is NaN" in measure.what_happened(run, console)


# Replaces ./launch_train.sh: steps of a second; every other run begins six seconds late.
LAUNCHER = r"""#!/bin/bash
for word; do
  case $word in --run_name=*) name=${word#*=} ;; --out_dir=*) out=${word#*=} ;; --num_iterations=*) steps=${word#*=} ;; esac
done
echo "$name $1 $steps ${OMP_NUM_THREADS--} ${CUDA_VISIBLE_DEVICES--}" >>"$CALLS"
mkdir "$out/$name"
for ((i = 1; i <= steps; i++)); do
  echo "{\"time\": $((i + ${name#run} % 2 * 6)), \"step\": $i, \"loss\": 1, \"step_ms\": 1000}"
done >"$out/$name/metrics.jsonl"
echo "{\"parameters\": 7, \"gradient_bytes\": $((12 * ($1 - 1)))}" >"$out/$name/summary.json"
[[ $1 != "${FAILING-}" ]] || { echo "[ERROR] planted"; exit 3; }
"""
Calls = Callable[[], list[list[str]]]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A project whose launcher only pretends; returns its calls, by name of the run."""
    script = tmp_path / "launch_train.sh"
    script.write_text(LAUNCHER)
    script.chmod(0o755)
    monkeypatch.setattr(experiments, "ROOT", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("FAILING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return lambda: sorted(
        (line.split() for line in (tmp_path / "calls").read_text().splitlines()),
        key=lambda words: int(words[0][3:]),
    )


def test_rounds_alternate_and_late_runs_get_more_steps(launcher: Calls, tmp_path: Path) -> None:
    first, second = measure.all_rounds(replace(EXPERIMENT, steps=8, rounds=2))[0]
    assert first == {RankLayout(1): 1000, RankLayout(2): 1000, RankLayout(2, True): None}, (
        "two runs with six of eight steps alone cannot be compared"
    )
    assert second == {RankLayout(1): 1000, RankLayout(2): 1000, RankLayout(2, True): 1000}
    ranks_and_steps = [(ranks, steps) for _, ranks, steps, *_ in launcher()]
    assert ranks_and_steps == [
        ("1", "13"),
        ("2", "13"),
        ("1", "13"),
        ("1", "13"),
        ("1", "19"),
        ("1", "19"),
        ("2", "13"),
        ("1", "13"),
    ]
    assert {tuple(call[3:]) for call in launcher()} == {("1", "-")}, "one thread each, on the CPU"
    assert not list(tmp_path.glob("duet-scaling-*"))


def test_runs_apart_have_a_gpu_each(launcher: Calls) -> None:
    _, sizes = measure.all_rounds(
        replace(EXPERIMENT, rounds=1, device="cuda", gpus=("GPU-a", "GPU-b"))
    )
    assert sizes == Sizes(7, {1: 0, 2: 12})
    assert [call[3:] for call in launcher()] == [
        ["-", "-"],
        ["-", "-"],
        ["-", "GPU-a"],
        ["-", "GPU-b"],
    ]


def test_a_run_that_fails_ends_the_measurement(
    launcher: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAILING", "2")
    with pytest.raises(measure.Failed) as caught:
        measure.all_rounds(EXPERIMENT)
    (kept,) = tmp_path.glob("duet-scaling-*")
    text = str(caught.value)
    assert caught.value.code == 3 and len(launcher()) == 2
    assert (
        "a run with 2 ranks failed (exit 3)" in text
        and "[ERROR] planted" in text
        and str(kept) in text
    )


def test_other_work_is_the_cpu_time_of_others_on_these_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Times = namedtuple("Times", "user nice system irq softirq steal")
    clock, machine, own = (
        [10.0],
        [Times(5, 0, 1, 0, 0, 0), Times(5, 0, 0, 0, 0, 1), Times(900, 0, 0, 0, 0, 0)],
        [1.0, 0.5, 2.0, 0.5, 99.0],
    )
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: machine)
    monkeypatch.setattr(measure.os, "times", lambda: own)
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1})
    work = measure.BackgroundLoad()
    clock[0], machine[0], machine[2], own[2] = (
        20.0,
        Times(14, 0, 2, 0, 0, 3),
        Times(999, 0, 0, 0, 0, 0),
        10.0,
    )
    assert work.cores() == pytest.approx((13 - 8) / 10)


# Verdicts


def test_bands() -> None:
    assert [analysis.band(n) for n in (2, 4, 8)] == [(1.8, 1.9), (3.5, 3.8), (7.0, 7.5)]
    assert analysis.band(3) == (2.65, 2.85) and analysis.band(6) == (5.25, 5.65)
    assert analysis.band(1) is None and analysis.band(16) is None


@pytest.mark.parametrize(
    ("ranks", "speed_up", "expected"),
    [
        (2, 1.794, "below"),
        (2, 1.796, "in_band"),
        (2, 1.904, "in_band"),
        (2, 1.906, "better"),
        (4, 3.49, "below"),
        (16, 3.0, "no_band"),
    ],
)
def test_verdict_fits_what_is_shown(ranks: int, speed_up: float, expected: str) -> None:
    assert analysis.verdict(ranks, speed_up) == expected


def rounds(*times: tuple[float, float, float | None]) -> list[measure.Round]:
    return [
        {RankLayout(1): alone, RankLayout(2): at_once, RankLayout(2, True): apart}
        for alone, at_once, apart in times
    ]


def report(
    *times: tuple[float, float, float | None], others: float = 0.1, made: Experiment = EXPERIMENT
) -> analysis.ScalingReport:
    return analysis.analyze(rounds(*times), made, Sizes(1_500_000, {1: 0, 2: 6_000_000}), others)


def test_ratios_are_made_within_a_round() -> None:
    """A machine that becomes twice as slow from round to round measures the same."""
    one, two = report((50, 54, 52), (100, 108, 104), (200, 216, 208)).results
    assert one.speed_up == 1 and one.verdict == "reference" and one.machine_ms is None
    assert two.speed_up == pytest.approx(1.852, abs=0.001) and two.efficiency == pytest.approx(
        0.926, abs=0.001
    )
    assert two.verdict == "in_band" and not two.noisy and two.step_ms == 108
    assert two.tokens_per_s == pytest.approx(2 * 4096 / 0.108)
    assert (two.machine_ms, two.exchange_ms) == (4, 4)
    assert two.gigabytes_per_s == pytest.approx(6e6 / 0.108 / 1e9)


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ((50, 60, 59), "0.33 below a speed-up of 2, mostly the machine"),
        ((50, 60, 51), "0.33 below a speed-up of 2, mostly the exchange of gradients"),
        ((50, 60, 55), "0.33 below a speed-up of 2, machine and exchange equally"),
        ((50, 50.2, 50), "nothing measurable"),
        (
            (50, 49, 50),
            "nothing, the speed-up is super-linear: an optimizer whose work is shared by the "
            "ranks, or noise",
        ),
    ],
)
def test_what_limits_it(times: tuple[float, float, float], limit: str) -> None:
    assert judge_main(times) == limit


def judge_main(times: tuple[float, float, float]) -> str:
    return render.main_limit(report(times).results[1])


# The report


def test_text() -> None:
    shown = render.text(report((50, 54, 52), (50, 54, 52)))
    header, one, two, *_ = shown.splitlines()
    assert header.split() == [
        "ranks",
        "step",
        "ms",
        "tokens/s",
        "speed-up",
        "efficiency",
        "expected",
        "verdict",
    ]
    assert one.split() == ["1", "50.0", "81,920", "1.00", "100.0", "%", "-", "the", "reference"]
    assert two.split() == [
        "2",
        "54.0",
        "151,704",
        "1.85",
        "92.6",
        "%",
        "1.80–1.90",
        "in",
        "the",
        "expected",
        "band",
    ]
    assert "2 independent runs at the same time, without exchange, take 52.0 ms" in shown
    assert "6.0 MB of gradients per rank and step, at least 0.11 GB/s" in shown
    assert "+2.0 ms (+4 % of a step)" in shown and "note:" not in shown


def test_ranks_that_share_cores_are_marked() -> None:
    shown = render.text(report((50, 100, 99), made=replace(EXPERIMENT, threads=2)))
    assert (
        "below the expected band (ranks share cores)" in shown
        and "2 ranks × 2 threads on 2 cores, so at most 1.00 ×" in shown
    )


def test_notes_on_a_busy_machine_rounds_that_differ_and_runs_that_did_not_overlap() -> None:
    shown = render.text(report((50, 54, None), (50, 70, None), others=0.9))
    assert "note: other processes used 0.9 of 2 cores" in shown
    assert "note: 2 ranks: 1.43 to 1.85 × across rounds" in shown
    assert "hardly overlapped" in shown and "--rounds=4" in shown


def test_on_gpus_other_things_are_shared() -> None:
    shown = render.text(report((50, 54, 52), made=replace(EXPERIMENT, device="cuda")))
    assert "power, cooling, PCIe" in shown
    assert "thread" not in "\n".join(render.introduction(replace(EXPERIMENT, device="cuda")))


def test_json_has_units_and_a_version() -> None:
    value = json.loads(json.dumps(render.record(report((50, 54, 52)))))
    assert (
        value["schema_version"] == 1
        and [r["gradients_mb_per_rank_and_step"] for r in value["results"]] == [0.0, 6.0]
        and value["notes"] == []
    )
    one, two = value["results"]
    assert (
        one["expected_speed_up_factor"] is None
        and one["limited_by"] is None
        and one["verdict"] == "reference"
    )
    assert (
        two["expected_speed_up_factor"] == [1.8, 1.9]
        and two["machine_ms_per_step"] == 2
        and two["exchange_ms_per_step"] == 2
    )
    assert (
        two["speed_up_factor"] == 1.8519
        and two["verdict"] == "in_band"
        and two["ranks_share_cores"] is False
    )
    unknown = render.record(analysis.analyze(rounds((50, 54, None)), EXPERIMENT, Sizes(), 0.0))
    assert unknown["parameters"] is None and unknown["results"][1]["limited_by"] is None
    assert unknown["results"][1]["gradients_mb_per_rank_and_step"] is None
