"""Figures read from real logs of other launchers, by framework."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from training.monitor.log_watch import LogWatch

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "foreign"
PATIENCE_S = 0.05  # for the GPU driver
MINUTES_AGO_S = 600


def look(log: Path) -> dict[str, Any]:
    return LogWatch(log).read(PATIENCE_S)


@pytest.fixture
def fixture(tmp_path: Path) -> Any:
    """A copy of a fixture, last written `ago_s` seconds ago."""

    def copied(name: str, ago_s: float = MINUTES_AGO_S) -> Path:
        log = tmp_path / name
        log.write_bytes((FIXTURES / name).read_bytes())
        os.utime(log, (time.time() - ago_s,) * 2)
        return log

    return copied


def curve(seen: dict[str, Any]) -> list[tuple[int, float]]:
    return [(p["step"], p["loss"]) for p in seen["loss_curve"]["points"]]


def parts(seen: dict[str, Any], section: str, *names: str) -> tuple[Any, ...]:
    return tuple(seen[section][name] for name in names)


EVAL = ("eval_name", "eval_unit", "eval_last", "eval_best", "eval_best_step")
# name: source, (step, total, epoch), loss, evaluation, number of points, first and last point
LOGS: dict[str, tuple[Any, ...]] = {
    "torchtitan.log": (
        "torchtitan",
        (30, 40, None),
        4.2231,
        ("val_loss", None, 4.3512, 4.3512, 30),
        4,
        (1, 8.1309),
        (30, 4.2231),
    ),
    "nanochat.log": (
        "nanochat",
        (250, 21400, 1),
        5.880012,
        ("val_bpb", "bits/byte", 1.2031, 1.2031, 250),
        5,
        (0, 11.090355),
        (250, 5.880012),
    ),
    "nanogpt.log": (
        "nanoGPT",
        (250, None, None),
        6.1503,
        ("val_loss", None, 6.1987, 6.1987, 250),
        4,
        (0, 10.9886),
        (250, 6.1503),
    ),
    "megatron.log": (
        "Megatron",
        (102, 500000, None),
        9.7,
        ("val_loss", None, 9.812, 9.812, 102),
        3,
        (100, 11.7),
        (102, 9.7),
    ),
    "kair.log": (
        "KAIR",
        (1600, None, 4),
        0.011,
        ("val_psnr", "dB", 31.05, 31.2, 1200),
        4,
        (200, 0.041),
        (1600, 0.011),
    ),
    "basicsr.log": ("BasicSR", (200, None, 0), 0.015, (None,) * 5, 2, (100, 0.019), (200, 0.015)),
    "duet.log": (
        "Duet",
        (100, None, 1),
        2.3456,
        ("val_bpb", "bits/byte", 1.2345, 1.2345, 100),
        2,
        (1, 5.5491),
        (100, 2.3456),
    ),
    "deepspeed.log": (
        "DeepSpeed",
        (20, None, None),
        2.1111,
        (None,) * 5,
        2,
        (10, 2.3456),
        (20, 2.1111),
    ),
    "imagenet.log": (
        None,
        (2500, 5005, 1),
        6.1,
        ("val_loss", None, 6.35, 6.35, 7505),
        5,
        (0, 7.1),
        (7505, 6.1),
    ),
    "keras.log": (
        "Keras",
        (469, 938, 2),
        0.39,
        ("val_loss", None, 0.41, 0.41, 938),
        4,
        (1, 2.412),
        (1407, 0.39),
    ),
    "metrics.csv": (
        None,
        (149, None, 1),
        1.72,
        ("val_loss", None, 1.66, 1.66, 199),
        3,
        (49, 2.512),
        (149, 1.72),
    ),
    "huggingface_file.log": (
        "Hugging Face Trainer",
        (40, 40, 2),
        3.899,
        ("eval_loss", None, 3.9, 3.9, 20),
        8,
        (5, 3.901),
        (40, 3.899),
    ),
    "huggingface_pty.log": (
        "Hugging Face Trainer",
        (40, 40, 2),
        3.899,
        ("eval_loss", None, 3.9, 3.9, 20),
        8,
        (5, 3.901),
        (40, 3.899),
    ),
    "huggingface_stdout.log": (  # metrics on the line of the bar, as standard output is buffered
        "Hugging Face Trainer",
        (12, 12, 0.75),
        4.321,
        ("eval_loss", None, 4.319, 4.317, 6),
        6,
        (2, 4.316),
        (12, 4.321),
    ),
    "lightning_running.log": (
        "Lightning",
        (450, 1000, 3),
        0.123,
        (None,) * 5,
        2,
        (3400, 0.13),
        (3450, 0.123),
    ),
    "lightning_tqdm_file.log": (
        "Lightning",
        (100, 100, 2),
        5.37e-05,
        ("val_loss", None, 5.18e-05, 5.18e-05, 300),
        60,
        (5, 7.23),
        (300, 5.37e-05),
    ),
    "lightning_tqdm_pty.log": (
        "Lightning",
        (50, 50, 1),
        0.0346,
        ("val_loss", None, 0.138, 0.138, 100),
        30,
        (5, 7.23),
        (150, 0.0346),
    ),
    "lightning_rich_pty.log": (
        "Lightning",
        (50, 50, 1),
        0.035,
        ("val_loss", None, 0.138, 0.138, 120),
        20,
        (3, 13.825),
        (150, 0.035),
    ),
    "lightning_rich_file.log": (
        "Lightning",
        (100, 100, 2),
        0.0,
        ("val_loss", None, 0.0, 0.0, 300),
        1,
        (300, 0.0),
        (300, 0.0),
    ),
}


def test_every_fixture_is_in_the_table() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == {*LOGS, "plain.log"}


@pytest.mark.parametrize("name", LOGS)
def test_log_of_a_framework(name: str, fixture: Any) -> None:
    source, at, loss, evaluation, count, first, last = LOGS[name]
    seen = look(fixture(name))
    assert parts(seen, "run", "source", "kind", "dir", "name") == (source, "log", None, name)
    assert parts(seen, "progress", "step", "total_steps", "epoch") == at
    assert seen["training"]["loss"] == loss
    assert parts(seen, "training", *EVAL) == evaluation
    points = curve(seen)
    assert (len(points), points[0], points[-1]) == (count, first, last)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert seen["loss_curve"]["over"] == "step" and seen["log"]["read_whole"]


def test_torchtitan_figures(fixture: Any) -> None:
    training = look(fixture("torchtitan.log"))["training"]
    assert (training["grad_norm"], training["mfu"], training["lr"]) == (
        4.5432,
        pytest.approx(0.0273),
        None,
    )
    # from a training step, not from the evaluation after it
    assert training["memory_bytes"] == int(4.2 * (1 << 30))
    # from rank 0; rank 1 printed the same with another loss
    assert (training["tokens_per_s"], training["tokens_per_s_of"]) == (
        12150.0,
        "device",
    )
    assert training["step_ms_median"] == pytest.approx(60_000 / 29)  # from the times in the lines
    assert training["loss_unit"] is None  # it trains image models too


def test_nanochat_figures(fixture: Any) -> None:
    seen = look(fixture("nanochat.log", ago_s=0))
    training, progress = seen["training"], seen["progress"]
    assert (training["loss_unit"], training["tokens_per_s"], training["tokens_per_s_of"]) == (
        "nats/token",
        1_089_000.0,
        "run",
    )
    assert training["mfu"] == pytest.approx(0.473)
    assert (training["step_ms_median"], training["step_ms_p95"]) == (481.5, 24000.11)
    assert (progress["elapsed_s"], progress["eta_s"]) == (120.0, pytest.approx(169.7 * 60))


def test_megatron_figures(fixture: Any) -> None:
    seen = look(fixture("megatron.log", ago_s=0))
    training = seen["training"]  # loss from rank 7, the last stage; memory from rank 0
    assert (training["lr"], training["grad_norm"], training["step_ms_median"]) == (
        1.2e-06,
        2.493,
        1810.0,
    )
    assert (training["memory_bytes"], training["loss_unit"]) == (7622 << 20, "nats/token")
    # two seconds per step by the clock
    assert seen["progress"]["eta_s"] == pytest.approx((500_000 - 102) * 2.0)


def test_figures_of_other_frameworks(fixture: Any) -> None:
    basicsr = look(fixture("basicsr.log", ago_s=0))
    assert (basicsr["progress"]["eta_s"], basicsr["training"]["step_ms_median"]) == (
        ((24 + 2) * 60 + 3) * 60 + 4,
        600.0,
    )
    own = look(fixture("duet.log"))["training"]
    assert (own["lr"], own["tokens_per_s"], own["loss_unit"]) == (2e-4, 34500.0, "nats/token")
    trainer = look(fixture("huggingface_file.log"))["training"]
    assert (trainer["lr"], trainer["grad_norm"], trainer["loss_unit"]) == (1.25e-06, 0.6385, None)


def test_bar_that_counts_within_an_epoch(fixture: Any) -> None:
    progress = look(fixture("lightning_running.log", ago_s=0))["progress"]
    assert parts(
        {"p": progress}, "p", "scope", "step", "total_steps", "percent", "epoch", "epochs"
    ) == ("epoch", 450, 1000, 45.0, 3, None)
    assert (progress["elapsed_s"], progress["eta_s"]) == (12.0, 15.0)
    assert look(fixture("nanochat.log"))["progress"]["scope"] == "run"


def test_non_finite_loss_is_shown(fixture: Any) -> None:
    seen = look(fixture("plain.log", ago_s=0))
    assert math.isnan(seen["training"]["loss"]) and seen["training"]["loss_is_finite"] is False
    assert [step for step, _ in curve(seen)] == [10, 20, 30] and math.isnan(curve(seen)[-1][1])
    assert (seen["run"]["source"], [a["text"] for a in seen["alerts"]][:1]) == (
        None,
        ["the loss is nan"],
    )


def test_curve_over_the_log_without_steps(tmp_path: Path) -> None:
    log = tmp_path / "no bar.log"
    log.write_text(
        "".join(
            f"{{'loss': {3 - i / 10:.1f}, 'learning_rate': 5e-05, 'epoch': {i / 10}}}\n"
            for i in range(4)
        )
    )
    seen = look(log)
    assert seen["progress"]["step"] is None and seen["progress"]["epoch"] == 0.3
    assert (seen["loss_curve"]["over"], [loss for _, loss in curve(seen)]) == (
        "place in the log",
        [3.0, 2.9, 2.8, 2.7],
    )


@each(
    "name, best",
    [
        ("val_reward_loss", 0.5), ("eval_mape", 0.5), ("val_wer", 0.5), ("val_error", 0.5),
        ("eval_reward", 0.9), ("val_map", 0.9), ("val_miou", 0.9), ("eval_top1_acc", 0.9),
        ("val_power", None), ("val_remapped", None),
    ],
)  # fmt: skip
def test_the_best_value_of_a_score(tmp_path: Path, name: str, best: float | None) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"step 10 loss 2.0 {name} 0.9\nstep 20 loss 1.9 {name} 0.5\n")
    seen = look(log)
    assert parts(seen, "training", "eval_name", "eval_last", "eval_best") == (name, 0.5, best)


def test_losses_that_a_loop_prints_behind_its_bar(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    bars = [f"\r{2 * i:3d}%|#| {i}/50 [00:01<00:05,  9.9it/s]" for i in range(43)]
    for i in range(10, 43, 10):
        bars[i] += f"step {i} loss {1 / i}\n"
    log.write_text("".join(bars))
    seen = look(log)
    assert parts(seen, "progress", "step", "total_steps", "percent") == (42, 50, 84.0)
    assert curve(seen) == [(i, 1 / i) for i in (10, 20, 30, 40)]
    # a bar for each epoch has another count
    log.write_text(
        "".join(f"\r 5%|#| 5/100 [00:01<00:19,  5it/s]step {i} loss 2\n" for i in (5, 905))
    )
    seen = look(log)
    assert parts(seen, "progress", "step", "total_steps", "percent") == (905, None, None)
    assert curve(seen) == [(5, 2.0), (905, 2.0)]
