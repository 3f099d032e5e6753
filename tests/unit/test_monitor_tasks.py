"""Runs of tasks other than gpt: their units and scores on the screen, as JSON, in the table of runs
and in their logs."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.monitor_runs import VIDEO, Made, check_size, dead_pid, look, text_of
from training.core import metric_units, rundir
from training.diagnose.log_parsers import line_parser
from training.monitor import run_list, screen
from training.monitor.health import run_checks
from training.monitor.health.activity import ActivityWindow
from training.monitor.health.target import Target
from training.monitor.run_list import RunTable
from training.monitor.screen import View
from training.tasks.base import Task
from training.tasks.gpt.task import LanguageModel
from training.trainer import summary as closing

SUMMARY: dict[str, Any] = {
    "status": "done",
    "loss_first": 0.0523,
    "loss_last": 0.00412,
    "val_psnr_first": 27.13,
    "val_psnr_last": 29.82,
}


@pytest.fixture
def video(tmp_path: Path) -> Made:
    return (
        Made(tmp_path / "experiments" / "video", task=VIDEO)
        .restored()
        .supervisor(os.getpid())
        .beats()
    )


def test_json_of_a_run_that_counts_samples(video: Made) -> None:
    seen = look(video.run)
    training = seen["training"]
    assert (seen["run"]["task"], training["samples"], training["samples_per_s"]) == (
        "video_restoration",
        1600,
        3.27,
    )
    assert training["tokens"] is training["tokens_per_s"] is training["loss_unit"] is None, (
        "no nats per token"
    )
    assert [training[f"eval_{key}"] for key in ("name", "unit", "last", "best", "best_step")] == [
        "val_psnr",
        "dB",
        29.0,
        29.0,
        100,
    ]
    assert {key for point in seen["speed_curve"]["points"] for key in point} == {
        "step",
        "samples_per_s",
    }
    assert (seen["progress"]["total_steps"], seen["progress"]["eta_s"]) == (
        300,
        pytest.approx(20, abs=10),
    ), "from its start event"
    json.dumps(seen)


def test_task_with_its_own_unit(tmp_path: Path) -> None:
    made = Made(tmp_path / "experiments" / "clips", task=VIDEO).supervisor(os.getpid())
    for step in range(1, 30):
        own = {"clips": step * 2, "clips_per_s": 2.5}
        rundir.append_json(
            made.run.metrics,
            {"time": made.first_step + step, "step": step, "loss": 1.0, "step_ms": 800.0, **own},
        )
    seen = look(made.run)
    training = seen["training"]
    assert [
        training[key] for key in ("unit", "samples", "samples_per_s", "tokens", "tokens_per_s")
    ] == ["clips", 58, 2.5, None, None]
    assert "2.5 clips/s" in text_of(made.run) and "58 clips" in text_of(made.run)
    assert "CLIPS/S" in run_list.screen(RunTable(tmp_path / "experiments").read(), View(100, 20))[2]


def test_json_of_a_run_that_counts_tokens(made: Made) -> None:
    seen = look(made.steps(10).run)
    assert (
        seen["training"]["samples"]
        is seen["training"]["samples_per_s"]
        is seen["run"]["task"]
        is None
    )
    assert {key for point in seen["speed_curve"]["points"] for key in point} == {
        "step",
        "tokens_per_s",
    }


def test_the_screen(video: Made) -> None:
    shown = text_of(video.run, 100, 30)
    for words in (
        "· video_restoration ·",
        "val 29.0000 dB (best, step 100)",
        "3.27 samples/s",
        "1,600 samples",
        "loss 0.00578",
        "of 300",
    ):
        assert words in shown, words
    assert "token" not in shown and "nats" not in shown
    wide = text_of(video.run, 160, 45)
    assert "samples/s │" in wide and " 3.27 │" in wide and "0.00578 │" in wide, (
        "small values keep their digits"
    )
    for width, height in ((20, 5), (80, 24), (200, 50)):
        check_size(look(video.run), width, height)
    assert "3.27 samples/s" in screen.one_line(look(video.run))


def test_end_of_a_run(video: Made) -> None:
    video.supervisor(dead_pid())
    rundir.write_json(
        video.run.summary, SUMMARY | {"val_ssim_first": 0.85, "val_ssim_last": 0.9, "samples": 1600}
    )
    assert "done: loss 0.0523 → 0.00412 · psnr 27.13 → 29.82 dB, ssim 0.85 → 0.9" in text_of(
        video.run, 100
    )
    assert "ssim 0.85 → 0.9" in " ".join(text_of(video.run, 60).split()), (
        "complete even if it does not fit in one line"
    )
    rundir.write_json(
        video.run.summary, {name: value for name, value in SUMMARY.items() if "val" not in name}
    )
    assert "done: loss 0.0523 → 0.00412\n" in text_of(video.run, 100).replace(" \n", "\n"), (
        "without validation there is no score"
    )


def test_side_by_side(video: Made, tmp_path: Path) -> None:
    def shown() -> list[str]:
        return run_list.screen(RunTable(tmp_path / "experiments").read(), View(100, 20))

    assert "SAMPLES/S" in shown()[2]
    Made(tmp_path / "experiments" / "text").steps(3)
    both = shown()
    assert "SPEED/S" in both[2] and "TOKENS" not in both[2]
    assert [" 3.27 " in line or " 38,000 " in line for line in both[3:5]] == [True, True]


@pytest.mark.parametrize(
    "task",
    [
        "gpt",
        3,
        None,
        {},
        {"name": 3, "unit": ["x"], "options": "x"},
        {"name": "\x1b[31mred", "options": {"data": 3}},
    ],
)
def test_any_task_in_a_plan(made: Made, task: object) -> None:
    made.steps(3)
    rundir.write_json(made.run.plan, made.plan | {"task": task})
    seen = look(made.run)
    check_size(seen, 80, 24)
    assert metric_units.data(made.plan | {"task": task}) is None
    assert "\x1b" not in "".join(screen.screen(seen, View(80, 24)))


def test_health_checks_count_samples(video: Made) -> None:
    seen = look(video.run)
    for rank in seen["ranks"]:
        rank["compute_ms_median"] = 40.0
    assert run_checks.speed(seen).text.startswith("a step takes 105 ms, 3.27 samples/s; ")
    assert "0.00578 at step 100" in run_checks.loss(seen).text
    ranks = [
        {
            "rank": r,
            "world_size": 2,
            "dataset_sequences": 90,
            "batches": 5,
            "count": 40,
            "first_sequences": [r],
        }
        for r in (0, 1)
    ]
    event = {"event": "shards", "epoch": 1, "proven_sequences": 80, "ranks": ranks}
    video.plan["batch"] = {"device_sequences": 8}
    found = run_checks.data(Target(video.run, video.plan, {}, 2, 2, "plan.json"), [event])
    assert found.text.startswith("epoch 1: 90 samples, 40 samples in 5 batches for each of 2 ranks")
    assert run_checks.of_run(
        Target(video.run, video.plan, {}, 2, 2, "plan.json"), ActivityWindow({}, 1.0), seen, [event]
    )


def test_duet_log_without_its_run() -> None:
    step = line_parser.parse(
        "[2026-11-21 03:00:00] Epoch: 1, Iter: 10, Loss: 0.0123, LR: 4.00e-04, 12 samples/s"
    )
    assert step and (step.step, step.loss, step.samples_per_s, step.tokens_per_s) == (
        10,
        0.0123,
        12.0,
        None,
    )
    scored = line_parser.parse(
        "[2026-11-21 03:00:00] Epoch: 1, Iter: 10, Validation: psnr 29.81, ssim 0.9123, psnr_input "
        "2.5e+01"
    )
    assert scored and scored.step == 10 and scored.loss is None
    assert scored.scores == {"val_psnr": 29.81, "val_ssim": 0.9123, "val_psnr_input": 25.0}
    video = line_parser.parse(
        "Epoch: 2, Iter: 20, Validation: PSNR 34.38 dB (-0.02 over the input), SSIM 0.9864"
    )
    assert video and video.scores == {"val_psnr": 34.38, "val_ssim": 0.9864}
    for unit in ("bits/byte", "bits per byte"):  # now, and in logs of earlier versions
        text = line_parser.parse(
            f"[2026-11-21 03:00:00] Epoch: 1, Iter: 10, Validation: 2.0235 {unit}"
        )
        assert text and text.scores == {"val_bpb": 2.0235}
    bits = line_parser.parse(
        "[2026-11-21 03:00:00] Epoch: 1, Iter: 30, Loss: 2.0103 bits/byte, LR: 8.21e-03, 61.9 "
        "tokens/s"
    )
    assert (
        bits and (bits.loss, bits.bits, bits.tokens_per_s) == (2.0103, True, 61.9) and not step.bits
    )
    clips = line_parser.parse("Epoch: 2, Iter: 20, Loss: 0.0257, LR: 1.19e-04, 41 clips/s")
    assert clips and (clips.samples_per_s, clips.tokens_per_s) == (41.0, None)
    for last in (
        "8.000 → 3.000 bits/byte; validation 8.100 → 3.250 bits/byte",
        "0.0523 → 0.0041; validation psnr 27.1 → 29.8 dB",
    ):
        assert line_parser.parse(f"  Loss       {last}") is None, (
            "the summary begins with the first loss"
        )
    other = line_parser.parse("steps: 10 loss: 2.3456 iter time (s): 1.234 samples/sec: 12.345")
    assert other and other.samples_per_s == 12.345


# Names


@each(
    "names, unit, more",
    [
        ("bpb", "bits/byte", False),
        ("psnr psnr_input", "dB", True),
        ("ssim ms_ssim mssim yssim ssimy", None, True),
        ("acc accuracy acc1 top1 valacc testacc clsacc mlmacc nodeacc gacc top1acc", None, True),
        ("iou mean_iou mIoU dice auc mAP50 f1_macro recall_at_5 recall_at_fpr", None, True),
        ("quality_score err_free_acc l1_dice acc_l1 f1_l2 recall_l1", None, True),
        ("loss acc_loss rmse acceleration_rmse depth_map_rmse dssim quality", None, False),
        ("top1_err err_top1 error_top5 top1err top1_error f1_err precision_err", None, False),
        ("depth_map_err map_l1 ssim_l2 jaccard_distance dice_distance iou_distance", None, False),
        ("auc_drop acc_gap dice_dist auc_fpr auc_fnr acc_eer fpr_at_recall95", None, False),
        ("fid_score brier_score crps_score hter_score davies_bouldin_score", None, False),
        ("perceptual_score calibration_score", None, False),
    ],
)
def test_units_and_directions_of_scores(names: str, unit: str | None, more: bool) -> None:
    found = {
        name: (metric_units.score_unit(key), metric_units.higher_is_better(key))
        for name in names.split()
        if (key := metric_units.EVALUATION + name)
    }
    assert found == dict.fromkeys(found, (unit, more))


def test_names_without_a_known_direction() -> None:
    names = ["val_quality", "val_mAP_L1", "val_depth_map_l1"]
    assert [metric_units.better_if_higher(name) for name in names] == [None] * 3
    higher = [metric_units.higher_is_better(name + metric_units.SCORE) for name in names]
    assert higher == [True] * 3, "as --keep_best suggests"


def test_score_for_comparing_runs() -> None:
    assert metric_units.scores(["step", "val_loss", "val_bpb", "eval_ms"]) == [
        "val_bpb",
        "val_loss",
    ]
    assert metric_units.scores(["val_psnr_input", "val_psnr", "val_ssim"])[0] == "val_psnr"
    assert metric_units.scores(["val_wer", "val_acc", "val_wer"]) == ["val_wer", "val_acc"], (
        "the first one that the task reports"
    )


def test_courses_of_scores() -> None:
    ends = {
        "val_psnr": (27.1, 29.812),
        "val_psnr_input": (25.3, 25.3),
        "val_acc": (0.5, None),
        "val_odd": ("x", 1.0),
    }
    summary = {
        f"{name}_{end}": value
        for name, pair in ends.items()
        for end, value in zip(("first", "last"), pair, strict=True)
    }
    assert metric_units.courses(summary) == ["psnr 27.1 → 29.81 dB", "psnr input 25.3 dB"]
    assert metric_units.courses({"loss_last": 1.0}) == []
    assert metric_units.course({"loss_first": 12345.6, "loss_last": 0.5}) == "12346 → 0.5"


@pytest.mark.parametrize("loss", [1.7e16, 0.0002, 2.5])
def test_huge_and_tiny_losses_are_short_and_not_zero(loss: float) -> None:
    run = {"loss_begin": loss, "loss_end": loss, "val_bpb_first": loss, "val_bpb_last": loss}
    facts: Any = {**run, "tokens": 1}
    task: Any = SimpleNamespace(data=SimpleNamespace(bytes_per_token=1 / math.log(2)))
    for text in (
        metric_units.course(facts),
        closing.learnt(facts),
        Task.shown_loss(task, loss),
        LanguageModel.shown_loss(task, loss),
        LanguageModel.shown(task, {"bpb": loss}),
    ):
        numbers = re.findall(r"\d[-+.e\d]*", text)
        assert {float(one) for one in numbers} == {loss} and max(map(len, numbers)) < 8, text
