"""Records received by real trackers: TensorBoard's files, and how a record is passed to any."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.unit.conftest import ROOT, clean_environment
from training.config.schema import Config
from training.core.rundir import RunDir, append_json
from training.trainer import metrics_writer
from training.trainer.tracker_threads import Trackers
from training.trainer.tracking import End, TensorBoard, figures, public

STEP = {
    "time": 1.0,
    "step": 3,
    "epoch": 1,
    "loss": 2.5,
    "mfu": None,
    "compute_ms": [1.5, 2.5],
    "memory_bytes": [10, None],
}
# Killed in the moment in which the trackers have handled the checkpoint.
KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from training.config.schema import Config
from training.core.rundir import RunDir
from training.trainer.metrics_writer import MetricsWriter
run = RunDir({run!r})
run.create()
recorder = MetricsWriter(run, Config(use_dummy_wandb=True))
for record in {records!r}:
    recorder.write(record)
recorder.checkpoint()
recorder._trackers._put(lambda sink: os.kill(os.getpid(), signal.SIGKILL))
recorder._trackers._threads[0].join()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a run")


def test_lists_become_one_number_per_rank() -> None:
    assert dict(figures(STEP)) == {
        "epoch": 1,
        "loss": 2.5,
        "compute_ms/rank0": 1.5,
        "compute_ms/rank1": 2.5,
        "memory_bytes/rank0": 10,
    }


def test_tensorboard_has_what_led_to_a_checkpoint_after_a_kill(run: RunDir) -> None:
    """The second start is killed too; it begins with the evaluation of the checkpoint's step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for records in (
        [STEP | {"step": 1}, STEP | {"step": 2}],
        [{"step": 2, "val_psnr": 30.0}, STEP | {"step": 3}],
    ):
        code = KILLED.format(root=str(ROOT), run=str(run.path), records=records)
        done = subprocess.run(
            [sys.executable, "-c", code], env=clean_environment(), timeout=120, check=False
        )
        assert done.returncode == -signal.SIGKILL
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("eval/val_psnr")] == [2]


def test_tensorboard_shows_each_number(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 6), (5, 8)):  # the second start continues from a checkpoint at step 4
        board = TensorBoard(run, first)
        if first > 1:
            board.note("restart: rank 1 was killed", first)
        for step in range(first, last + 1):
            board.write(STEP | {"step": step, "loss": 100 * first + step})
        board.write({"step": last, "val_psnr": 30.0, "eval_ms": 5.0})
        board.close(End(0, {"steps": last, "loss_last": 1.5, "status": "done", "mfu": None}))
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    scalars = {
        "train/epoch",
        "train/loss",
        "train/compute_ms/rank0",
        "train/compute_ms/rank1",
        "train/memory_bytes/rank0",
    }
    assert set(events.Tags()["scalars"]) == scalars | {
        "eval/val_psnr",
        "eval/eval_ms",
        "summary/steps",
        "summary/loss_last",
    }
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        *((step, 100.0 + step) for step in range(1, 5)),
        *((step, 500.0 + step) for step in range(5, 9)),
    ], "steps of the first start after the checkpoint are hidden"
    assert events.Tags()["tensors"] == ["event/text_summary"]


def test_only_a_trackers_own_thread_is_a_tracker_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of the user's task keeps its traceback."""
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    trackers = Trackers({"TensorBoard": lambda _: MagicMock()}, print)
    trackers.write({"step": 1, "loss": 1.0})
    for module, its in (("wandb.sdk.lib", True), ("my_prefetcher", False), ("wandbox", False)):
        code: dict[str, Any] = {"__name__": module}
        exec("def fails(): raise KeyError('clip_0042')", code)
        thread = threading.Thread(target=code["fails"])
        thread.start()
        thread.join()
        said = capsys.readouterr().err
        assert (len(seen) == 0, "clip_0042" in said) == (its, its), module
        seen.clear()
    trackers.close(End(0), 1.0)


def test_secrets_in_the_configuration_are_not_sent_to_wandb() -> None:
    sent = public(vars(Config(notify="curl $X", run_name="a", data="https://me:geheim@host/text")))
    assert "notify" not in sent and sent["depth"] == 12 and sent["keep_checkpoints"] == 2
    assert sent["data"] == "set, not shown" and "geheim" not in json.dumps(sent)


def test_events_for_trackers_have_no_secrets(run: RunDir) -> None:
    run.create()
    append_json(run.events, {"event": "failure", "text": "of an earlier start"})
    append_json(run.events, {"event": "start"})
    failure = "OSError: https://me:hunter42@host/x, hf_abcdefghijklmnopqrst"
    for kind, text in (("failure", failure), ("eval", "x"), ("restart", "from step 15")):
        append_json(run.events, {"event": kind, "text": text})
    assert metrics_writer._since_the_last_start(run) == [
        "failure: OSError: https://…@host/x, …",
        "restart: from step 15",
    ]


def test_torch_and_wandb_are_not_imported_before_the_first_record() -> None:
    code = (
        "import sys, training.trainer.metrics_writer; print([m for m in ('torch', 'wandb', "
        "'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
