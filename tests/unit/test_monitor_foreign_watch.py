"""Logs of other launchers that grow, end, or are unusual: their states, and how they are read."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.monitor_runs import Made
from training.core.errors import Exit
from training.diagnose.log_parsers import log_tail as text_module
from training.monitor import alerts, live, log_watch, state
from training.monitor.log_watch import SILENT, LogWatch
from training.monitor.run_status import ENDED

PATIENCE_S = 0.05
STEPS = "".join(f"step {n} loss {3 - n / 100:.2f}\n" for n in range(10, 110, 10))
CRASH = (
    'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\n    '
    "main()\nRuntimeError: CUDA error: out of memory\n"
)


def look(log: Path) -> dict[str, Any]:
    return LogWatch(log).read(PATIENCE_S)


def made(folder: Path, content: str | bytes, ago_s: float = 600) -> Path:
    log = folder / "some.log"
    log.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(log, (time.time() - ago_s,) * 2)
    return log


def verdict(log: Path) -> tuple[str, str | None]:
    run = look(log)["run"]
    return run["state"], run["reason"]


# States

ENDS = {
    "Training completed\n": ("finished", None),
    "[rank0]:[titan] 2025-02-10 12:00:00,123 - root - INFO - Training completed\n": (
        "finished",
        None,
    ),
    "`Trainer.fit` stopped: `max_steps=150` reached.\n": ("finished", None),
    "{'train_runtime': '5.1', 'train_loss': '3.9', 'epoch': '2'}\n\r100%|███| 110/110 "
    "[00:01<00:00, 9.0it/s]\n": (
        "finished",
        None,
    ),
    "Peak memory usage: 100.00MiB\nTotal training time: 5.00m\nMinimum validation bpb: 0.9500\n": (
        "finished",
        None,
    ),
    CRASH: ("failed", "RuntimeError: CUDA error: out of memory"),
    "[rank1]: " + CRASH.replace("\n", "\n[rank1]: ", 3): (
        "failed",
        "rank 1: RuntimeError: CUDA error: out of memory",
    ),
    CRASH
    + CRASH.replace(
        "RuntimeError: CUDA error: out of memory",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ): (
        "failed",
        "RuntimeError: CUDA error: out of memory",
    ),
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n": (
        "failed",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
    ),
    "Killed\n": ("failed", "Killed"),
    CRASH + "Job finished at Mon Jun 2\n": ("failed", "RuntimeError: CUDA error: out of memory"),
    CRASH + "step 110 loss 1.00\nTraining finished\n": ("finished", None),
    "Killed\nJob completed with exit code 1\n": ("failed", "Job completed with exit code 1"),
    "Jun 01 12:00:00 ws1 systemd[1]: a.service: Main process exited, code=killed, status=9/KILL\n": (
        "failed",
        "a.service: Main process exited, code=killed, status=9/KILL",
    ),
    "job 7 finished with status FAILED\n": ("failed", "job 7 finished with status FAILED"),
    "Training finished with no errors, 0 failed\n": ("finished", None),
    "Run finished: 120 passed, 2 failed\n": ("finished", None),
    CRASH + "`Trainer.fit` stopped: `max_epochs=3` reached.\n": ("finished", None),
    CRASH + "{'train_runtime': '5.1', 'train_loss': '3.9'}\n": ("finished", None),
    CRASH + "training_seconds:  300.1\n": ("finished", None),
    CRASH + "3 epochs completed in 0.5 hours.\n": ("finished", None),
}


@each("end", ENDS)
def test_printed_end(end: str, tmp_path: Path) -> None:
    assert verdict(made(tmp_path, STEPS + end)) == ENDS[end]
    assert verdict(made(tmp_path, STEPS + end, ago_s=0)) == ENDS[end]  # also immediately after it


@pytest.mark.parametrize("end", ["Training completed\n", CRASH])
def test_continued_output_means_not_ended(end: str, tmp_path: Path) -> None:
    log = made(tmp_path, STEPS + end + "".join(f"step {n} loss 1.0\n" for n in (110, 120, 130)))
    assert verdict(log)[0] == SILENT


def test_silent_log_reports_its_last_output(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS)
    seen, since = (
        look(log)["run"],
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(log.stat().st_mtime)),
    )
    assert (seen["state"], seen["ended_unix_s"]) == (SILENT, pytest.approx(log.stat().st_mtime))
    assert seen["reason"] == f"no output since {since}, 10:00 ago; how it ended is unknown"


def test_running_with_rare_lines(tmp_path: Path) -> None:
    rare = "".join(f"2026-01-02 0{n}:00:00 step {n} loss 1.0\n" for n in range(5))  # one per hour
    assert verdict(made(tmp_path, rare)) == ("running", None)
    assert verdict(made(tmp_path, STEPS, ago_s=30)) == ("running", None)


def test_running_while_a_process_writes(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS + CRASH)
    with (
        log.open("a") as file,
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file
        ) as writer,
    ):
        seen = look(log)["run"]
        assert seen["state"] == "running"
        assert (
            seen["reason"]
            == f"RuntimeError: CUDA error: out of memory, but a process still writes to the log "
            f"(pid {writer.pid})"
        )
        writer.communicate(b"\n")
    os.utime(log, (time.time() - 600,) * 2)
    assert verdict(log)[0] == "failed"


def test_reader_does_not_keep_it_running(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS)
    with (
        log.open("rb") as file,
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], stdin=file
        ) as reader,
    ):
        assert verdict(log)[0] == SILENT
        reader.kill()


# Growing


def test_later_reads_cover_new_lines(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS)
    watch = LogWatch(log)
    assert watch.read(PATIENCE_S)["progress"]["step"] == 100
    with log.open("a") as file:
        file.write("step 110 loss 1.50\nstep 120 lo")
    seen = watch.read(PATIENCE_S)
    assert (seen["run"]["state"], seen["progress"]["step"], seen["training"]["loss"]) == (
        "running",
        110,
        1.5,
    )
    assert seen["training"]["last_step_unix_s"] == pytest.approx(log.stat().st_mtime)
    with log.open("a") as file:
        file.write("ss 1.25\n")
    seen = watch.read(PATIENCE_S)
    assert (
        seen["progress"]["step"],
        seen["training"]["loss"],
        len(seen["loss_curve"]["points"]),
    ) == (120, 1.25, 12)


def test_progress_bar_is_read_before_its_line_ends(tmp_path: Path) -> None:
    log = made(tmp_path, "\r 10%|█  | 10/100 [00:10<01:30, 1.00s/it, loss=2.5]", ago_s=0)
    watch = LogWatch(log)
    assert watch.read(PATIENCE_S)["progress"]["step"] == 10
    with log.open("a") as file:
        file.write("\r 20%|██  | 20/100 [00:20<01:20, 1.00s/it, loss=2.0]")
    seen = watch.read(PATIENCE_S)
    assert [(p["step"], p["loss"]) for p in seen["loss_curve"]["points"]] == [(10, 2.5), (20, 2.0)]
    assert (seen["progress"]["elapsed_s"], seen["progress"]["eta_s"]) == (20.0, 80.0)
    assert seen["log"]["last_lines"] == [" 20%|██  | 20/100 [00:20<01:20, 1.00s/it, loss=2.0]"]


def test_restarted_run_repeats_steps(tmp_path: Path) -> None:
    seen = look(made(tmp_path, STEPS + "step 60 loss 9.0\nstep 70 loss 8.0\n"))
    assert [(p["step"], p["loss"]) for p in seen["loss_curve"]["points"]][-3:] == [
        (50, 2.5),
        (60, 9.0),
        (70, 8.0),
    ]
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (70, 8.0)


@pytest.mark.parametrize("how", ["truncated", "rotated"])
def test_replaced_file_is_read_from_its_start(how: str, tmp_path: Path) -> None:
    log = made(tmp_path, STEPS)
    watch = LogWatch(log)
    watch.read(PATIENCE_S)
    if how == "rotated":
        log.rename(tmp_path / "some.log.1")
    log.write_text("step 1 loss 7.00\n")
    seen = watch.read(PATIENCE_S)
    assert (
        seen["progress"]["step"],
        [(p["step"], p["loss"]) for p in seen["loss_curve"]["points"]],
    ) == (1, [(1, 7.0)])


@pytest.mark.parametrize("how", ["killed", "removed", "rotated"])
def test_the_death_of_its_writer_is_the_end(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--follow-exit waited forever after kill -9 of the training, which prints no end."""
    monkeypatch.setattr(log_watch, "RECENT_S", 0.2)
    monkeypatch.setattr(alerts, "LATE_LINES", 0)
    log = made(tmp_path, STEPS)
    watch = LogWatch(log)
    with (
        log.open("a") as file,
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file
        ) as writer,
    ):
        file.close()
        assert watch.read(PATIENCE_S)["run"]["state"] == "running"
        if how == "removed":
            log.unlink()
        if how == "rotated":
            log.rename(tmp_path / "some.log.1")
            made(tmp_path, "")
        if how != "killed":
            assert watch.read(PATIENCE_S)["run"]["state"] in (SILENT, "starting")
            time.sleep(0.3)
            seen = watch.read(PATIENCE_S)["run"]
            assert (seen["state"], seen["reason"]) == (
                SILENT,
                f"the process that wrote the log (pid {writer.pid}) still runs, but no longer writes "
                "to this file: the log was rotated or removed",
            )
        writer.kill()
        writer.communicate()
    deadline = time.monotonic() + 30
    while (seen := watch.read(PATIENCE_S))["run"]["state"] != "died":
        assert time.monotonic() < deadline, seen["run"]
        time.sleep(0.05)
    reason = seen["run"]["reason"]
    assert (
        reason == "the log is gone" if how == "removed" else f"(pid {writer.pid}) is gone" in reason
    )
    assert live.status(seen) == Exit.TRAINING and seen["run"]["state"] in ENDED


def test_a_log_in_the_future_is_running_while_it_grows(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS, ago_s=-9000)
    watch = LogWatch(log)
    assert watch.read(PATIENCE_S)["run"]["reason"].endswith(" 0:00 ago; how it ended is unknown")
    with log.open("a") as file:
        file.write("step 110 loss 1.0\n")
    os.utime(log, (time.time() + 9000,) * 2)
    assert [watch.read(PATIENCE_S)["run"]["state"] for _ in range(2)] == ["running"] * 2


def test_removed_log_keeps_its_last_state(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS)
    watch = LogWatch(log)
    watch.read(PATIENCE_S)
    log.unlink()
    seen = watch.read(PATIENCE_S)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["progress"]["step"]) == (
        SILENT,
        "the log is gone",
        100,
    )
    log.write_text("step 1 loss 7.00\n")
    assert watch.read(PATIENCE_S)["progress"]["step"] == 1


def test_interleaved_ranks(tmp_path: Path) -> None:
    both = "".join(
        f"[rank1]: step {n} loss {n}.5\n[rank0]: step {n} loss {n}.0\n" for n in (1, 2, 3)
    )
    assert [(p["step"], p["loss"]) for p in look(made(tmp_path, both))["loss_curve"]["points"]] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    # without rank 0: the first rank in the log
    third = both.replace("[rank0]", "[rank3]").replace("[rank1]", "[rank2]")
    assert [
        (p["step"], p["loss"]) for p in look(made(tmp_path, third))["loss_curve"]["points"]
    ] == [(1, 1.5), (2, 2.5), (3, 3.5)]


# Any size, any encoding


def test_long_log_is_sampled_and_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    with log.open("w") as file:
        for n in range(200_000):
            file.write(f"step {n} loss {1 + 1000 / (n + 1000):.6f} some more words\n")
        file.write("step 199999 val_loss 0.5\n")
    assert log.stat().st_size > 7 * text_module.WHOLE
    seen = look(log)
    points = [(p["step"], p["loss"]) for p in seen["loss_curve"]["points"]]
    assert (
        not seen["log"]["read_whole"]
        and seen["progress"]["step"] == 199_999
        and seen["training"]["eval_last"] == 0.5
    )
    assert len(points) > 150 and points[-1][0] == 199_999 and points[0][0] < 2_000
    assert max(b[0] - a[0] for a, b in itertools.pairwise(points)) < 4_000  # no hole in the middle
    assert all(loss == pytest.approx(1 + 1000 / (step + 1000), abs=0.3) for step, loss in points)


def test_log_state_has_all_fields_of_a_run(made_run: Made, tmp_path: Path) -> None:
    """So that every view of a run also shows a log."""
    run = state.RunWatch(made_run.steps(3).run).read(PATIENCE_S)
    log = look(made(tmp_path, STEPS))
    assert run.keys() <= log.keys()
    for section in ("run", "progress", "training", "loss_curve", "log"):
        assert run[section].keys() <= log[section].keys(), section


@pytest.fixture
def made_run(tmp_path: Path) -> Made:
    return Made(tmp_path / "experiments" / "a run")
