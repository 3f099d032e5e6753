"""A user script under Duet's launcher, whose figures are in its output."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, dead_pid, look, program, text_of
from training.core import rundir
from training.core.errors import Exit
from training.diagnose.log_parsers.log_metrics import LogMetrics
from training.monitor import state
from training.monitor.health import health

KAIR = Path(__file__).parents[1] / "fixtures" / "foreign" / "kair.log"
SCRIPT = {
    "path": "main_train_vrt.py",
    "args": ["--dist", "True"],
    "python": "/usr/bin/python3",
    "python_reason": "as asked",
}
STEPS = "".join(f"step {n} loss {3 - n / 100:.2f}\n" for n in range(10, 110, 10))


@pytest.fixture
def script(tmp_path: Path) -> Made:
    made = Made(
        tmp_path / "experiments" / "main_train_vrt_20261121_030000",
        script=SCRIPT,
        config={},
        task=None,
    )
    return made.supervisor(os.getpid())


def print_of(made: Made, name: str, text: str) -> Path:
    made.run.ranks.mkdir(exist_ok=True)
    with (log := made.run.ranks / name).open("a") as file:
        file.write(text)
    return log


def test_a_watched_command_has_the_name_that_its_user_typed(script: Made) -> None:
    """`duet watch` is `duet run` with a flag."""
    launchers = {"spawn": "duet run", "watch": "duet watch"}
    for launcher, name in launchers.items():
        command = {"script": "duet run", "args": ["1"], "cwd": "/"}
        changed = {"command": command, "launcher": {"value": launcher}}
        rundir.write_json(script.run.plan, script.plan | changed)
        assert look(script.run)["run"]["script"] == name
        assert f"{name} · main_train_vrt.py" in text_of(script.run)


def test_script_without_output_runs_without_a_step(script: Made) -> None:
    print_of(script, "rank0.log", "loading\n")
    seen = look(script.run)
    assert (seen["run"]["state"], seen["run"]["program"], seen["run"]["source"]) == (
        "running",
        "main_train_vrt.py",
        None,
    )
    assert seen["progress"]["step"] is None and seen["progress"]["elapsed_s"] == pytest.approx(
        100, abs=30
    )
    assert "no step yet" in text_of(
        script.run
    ) and "train_dual_gpu.sh · main_train_vrt.py · 2 ranks" in text_of(script.run)


def test_figures_of_a_script_are_shown_like_those_of_a_task(script: Made) -> None:
    print_of(script, "rank0.log", KAIR.read_text())
    print_of(script, "rank1.log", STEPS)
    seen, shown = look(script.run), text_of(script.run, 120, 40)
    assert seen["run"]["source"] == "KAIR" and "main_train_vrt.py (KAIR)" in shown
    assert seen["progress"]["step"] and f"step {seen['progress']['step']:,}" in shown
    assert (
        seen["training"]["loss"] == pytest.approx(seen["loss_curve"]["points"][-1]["loss"])
        and "│" in shown
    )
    plain = program(f"--run={script.run.path}", "--json")
    assert (
        f'"step": {seen["progress"]["step"]}' in plain.stdout and '"source": "KAIR"' in plain.stdout
    )


@pytest.mark.parametrize(
    ("name", "other"), [("rank1.log", "rank0.log"), ("torchrun.log", "torchrun.log")]
)
def test_figures_from_the_last_rank_or_from_torchrun(script: Made, name: str, other: str) -> None:
    if name == "torchrun.log":  # the ranks' processes are unknown
        rundir.write_json(
            script.run.supervisor,
            {
                "pid": os.getpid(),
                "started": script.at + 1,
                "ranks": [{"rank": None, "pid": os.getpid()}],
            },
        )
    watch = state.RunWatch(script.run)
    print_of(script, other, "loading\n")
    assert watch.read()["progress"]["step"] is None
    print_of(script, name, STEPS)
    assert watch.read()["progress"]["step"] == 100
    print_of(script, name, "step 110 loss 1.5\n")
    seen = watch.read()
    assert (
        seen["progress"]["step"],
        seen["training"]["loss"],
        len(seen["loss_curve"]["points"]),
    ) == (110, 1.5, 11)
    assert seen["run"]["state"] == "running"


def test_a_script_that_prints_only_epochs(script: Made) -> None:
    """PyTorch's DDP tutorial, whose steps are those of an epoch."""
    size = "Batchsize: 32 | Steps: 2048"
    log = print_of(script, "rank0.log", f"[GPU0] Epoch 4 | {size}\n[GPU0] Epoch 5 | {size}\n")
    print_of(script, "rank1.log", f"[GPU1] Epoch 4 | {size}\n")
    os.utime(log, (time.time() - 700,) * 2)
    seen = look(script.run)
    keys = ("epoch", "step", "total_steps", "percent", "scope")
    assert [seen["progress"][key] for key in keys] == [5, None, 2048, None, "epoch"]
    assert seen["training"]["last_step_unix_s"] is None and not seen["alerts"]
    shown = text_of(script.run)
    assert "epoch 5" in shown and "2,048" in shown and "no step" not in shown
    # a loss printed below it has the epoch, but the count may be that of the run
    print_of(script, "rank0.log", "step 5000 loss 1.5\n")
    seen = look(script.run)
    assert [seen["progress"][key] for key in keys] == [5, 5000, None, None, "run"]


def test_figures_are_preferred_to_epochs(script: Made) -> None:
    print_of(script, "rank0.log", "Epoch 2/9\n")
    assert look(script.run)["progress"]["epoch"] == 2
    print_of(script, "rank1.log", STEPS)
    assert look(script.run)["progress"]["step"] == 100


def test_ended_script_keeps_its_last_figures(script: Made) -> None:
    print_of(script, "rank0.log", STEPS)
    script.supervisor(dead_pid()).failure()
    seen = look(script.run)
    assert (seen["run"]["state"], seen["progress"]["step"], seen["progress"]["eta_s"]) == (
        "failed",
        100,
        None,
    )


@pytest.mark.parametrize(("ago_s", "alert"), [(200, False), (700, True)])
def test_script_that_prints_rarely_is_not_stalled(script: Made, ago_s: float, alert: bool) -> None:
    """It prints every hundredth step of one second: only its usual interval counts."""
    slow = "".join(f"step {n} loss 2.5 dt: 1000.0ms\n" for n in range(100, 1100, 100))
    log = print_of(script, "rank0.log", slow)
    os.utime(log, (time.time() - ago_s,) * 2)
    rundir.write_json(script.run.plan, script.plan | {"created": time.time() - 1000})
    seen = look(script.run)
    assert seen["training"]["told_every_s"] == pytest.approx(100)
    shown = [a["text"] for a in seen["alerts"] if "step" in a["text"]]
    assert len(shown) == alert and all(re.fullmatch(r"no step for 7\d\d s", t) for t in shown), (
        shown
    )
    assert "no heartbeat" not in text_of(script.run), "a script's ranks have no heartbeat"


def test_records_have_times_if_all_lines_have_them(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    line = (
        "26-11-22 03:{minute}:00.000 : <epoch:  0, iter: {step:7,d}, lr:4.000e-04> G_loss: "
        "1.5e-01 \n"
    )
    average = (
        "26-11-22 03:12:30.000 : <epoch:  0, iter:       2 Average PSNR: 17.66 dB; SSIM: "
        "0.6793; PSNR_Y: 19.27 dB; SSIM_Y: 0.8268\n"
    )
    log.write_text(
        line.format(minute=11, step=1)
        + line.format(minute=12, step=2)
        + average
        + line.format(minute=13, step=3)
    )
    # in a time zone six hours behind UTC
    written = datetime(2026, 11, 22, 9, 13, 1, tzinfo=timezone.utc).timestamp()
    os.utime(log, (written, written))
    figures = LogMetrics(log)
    figures.read(written)
    assert [(r["step"], r["time"] - written, r.get("loss")) for r in figures.records()] == [
        (1, -121, 0.15),
        (2, -61, 0.15),
        (2, -61, None),
        (3, -1, 0.15),
    ]
    log.write_text(log.read_text() + "step 4 loss 0.2\n")
    figures.read(written)
    assert all("time" not in record for record in figures.records())


def test_the_rank_table_has_the_process_and_the_output_of_each_rank(script: Made) -> None:
    """Of rank 0 a live process, of rank 1 one that is gone."""
    print_of(script, "rank0.log", STEPS)
    print_of(script, "rank1.log", "loading\n 10 %\r 50 %")
    ranks = [{"rank": 0, "pid": os.getpid()}, {"rank": 1, "pid": dead_pid()}]
    facts = rundir.read_json(script.run.supervisor) or {}
    rundir.write_json(script.run.supervisor, facts | {"ranks": ranks})
    watch = state.RunWatch(script.run)
    watch.read()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    here, gone = watch.read()["ranks"]
    assert (here["step"], here["last_line"]) == (100, "step 100 loss 2.00")
    assert (gone["step"], gone["last_line"]) == (None, " 50 %")
    assert here["rss_bytes"] > 10 << 20 and here["output_age_s"] < 60
    assert here["cpu_percent"] and 5 < here["cpu_percent"] < 100 * (os.cpu_count() or 1) + 20
    assert "rss_bytes" not in gone and here["gpu_bytes"] is None
    table = next(line for line in text_of(script.run).splitlines() if "LAST OUTPUT" in line)
    assert table.split()[:5] == ["RANK", "PID", "STEP", "CPU", "MEMORY"]


def test_a_script_without_steps_that_has_ended(script: Made) -> None:
    print_of(script, "rank0.log", "loading\n")
    script.supervisor(dead_pid()).summary()
    report = health.of_run(script.run)
    assert (report.answer, report.code) == ("ended", Exit.DONE)
    assert re.fullmatch(r"finished [^;]* ago; no step was recorded", report.text), report.text
