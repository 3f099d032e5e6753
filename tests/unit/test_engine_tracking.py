"""Records received by real trackers: TensorBoard's files, and W&B's client with a server on
loopback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.conftest import TOKEN
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.wandb_server import WandbServer
from training.config.schema import Config
from training.core.rundir import RunDir, append_json, read_json, read_records, write_json
from training.trainer import metrics_writer, tracking
from training.trainer.tracker_threads import Trackers
from training.trainer.tracking import End, TensorBoard, figures, public

KEY = "0123456789abcdef0123456789abcdef01234567"
STEP = {
    "time": 1.0,
    "step": 3,
    "epoch": 1,
    "loss": 2.5,
    "mfu": None,
    "compute_ms": [1.5, 2.5],
    "memory_bytes": [10, None],
}
# A rank 0 that has trained a few steps; how it ends is appended.
RANK_0 = """
import sys, time
sys.path.insert(0, sys.argv[1])
from training.config.schema import Config
from training.trainer import metrics_writer, tracking
from training.trainer.metrics_writer import MetricsWriter
from training.core.rundir import RunDir
run, mode, first, last = RunDir(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
run.create()
tracking.WANDB_INIT_S = 3.0
recorder = MetricsWriter(run, Config(wandb_mode=mode, tensorboard=False, notify="my command"))
took = []
for step in range(first, last + 1):
    begun = time.perf_counter()
    recorder.write({"step": step, "loss": 10 / step, "mfu": None, "compute_ms": [1.0, 2.0 + step]})
    took.append(time.perf_counter() - begun)
recorder.write({"step": last, "val_bpb": 1.25})
"""
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
FAILED = """
while recorder._trackers._threads[0]._queue.qsize():  # it started long before
    time.sleep(0.01)
metrics_writer.failed(1)
"""
FINISHED = 'recorder.close({"steps": last, "loss_last": 0.5, "status": "done", "mfu": None}, 0)'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a run")


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as made:
        yield made


def train(
    run: RunDir,
    mode: str,
    end: str,
    home: Path,
    token: str,
    first: int = 1,
    last: int = 20,
    **variables: str,
) -> str:
    """Train in a subprocess and return its standard error."""
    env = clean_environment(HOME=str(home), **{TOKEN: token}, **variables)
    command = [
        sys.executable,
        "-c",
        RANK_0 + textwrap.dedent(end),
        str(ROOT),
        str(run.path),
        mode,
        str(first),
        str(last),
    ]
    done = subprocess.run(
        command, env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def identity(run: RunDir) -> str:
    known = read_json(run.wandb_id)
    assert known and list(known) == ["id", "folder"], "the id of the run and nothing else"
    return str(known["id"])


def assert_nowhere(key: str, *folders: Path) -> None:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert key.encode() not in path.read_bytes(), f"the key is in {path}"


# ── format of a record
# ─────────────────────────────────────────────────────────────────────────────────────────────


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


# ── W&B ───────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.slow
def test_an_offline_run_is_sent_by_wandb_sync(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer
) -> None:
    """Two starts of one run become one run on the server, with every record, including those of
    repeated steps."""
    train(run, "offline", FAILED, tmp_path, token, WANDB_API_KEY=KEY)
    append_json(run.events, {"event": "start"})
    append_json(
        run.events, {"event": "restart", "text": "rank 1 was killed: started again from step 15"}
    )
    train(run, "offline", FINISHED, tmp_path, token, first=16, last=24, WANDB_API_KEY=KEY)
    assert_nowhere(KEY, tmp_path)
    parts = sorted(run.wandb.glob("offline-run-*"))
    assert len(parts) == 2 and all(part.name.endswith(identity(run)) for part in parts)

    env = clean_environment(
        HOME=str(tmp_path), WANDB_BASE_URL=server.address, WANDB_API_KEY=KEY, **{TOKEN: token}
    )
    command = [str(Path(sys.executable).with_name("wandb")), "sync", "--yes", *map(str, parts)]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(server.runs) == [identity(run)]
    got = server.run(identity(run))
    recorded = [r for r in read_records(run.metrics) if "loss" in r]
    assert len(recorded) == 29
    assert sorted((r["step"], r["loss"]) for r in got.history if "loss" in r) == sorted(
        (r["step"], r["loss"]) for r in recorded
    )
    assert {r["compute_ms/rank1"] for r in got.history if r.get("step") == 7} >= {9.0}
    assert [r["event"] for r in got.history if "event" in r] == [
        "restart: rank 1 was killed: started again from step 15"
    ]
    assert (got.summary["status"], got.summary["loss_last"]) == ("done", 0.5)
    assert got.config["depth"] == 12 and "notify" not in got.config


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (FINISHED, 0),
        (FAILED, 1),
        ('recorder.close({"steps": last, "status": "stopped"}, 75)', 75),
        # Ctrl-C is not a failure
        (
            'recorder.close({"steps": last, "status": "stopped"}, 130)',
            0,
        ),
    ],
    ids=["finished", "failed", "preempted", "stopped"],
)
def test_the_end_of_an_online_run_is_recorded(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer, end: str, code: int
) -> None:
    """`wandb sync` and the live client use the same protocol; the exit status decides the state
    that W&B shows."""
    output = train(
        run, "online", end, tmp_path, token, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address
    )
    got = server.run(identity(run))
    assert got.exit_codes == [code], output
    assert got.losses == {step: 10 / step for step in range(1, 21)}
    assert_nowhere(KEY, tmp_path)


def test_without_a_network_wandb_is_offline_and_the_key_is_not_written(
    run: RunDir, tmp_path: Path, token: str
) -> None:
    output = train(
        run,
        "online",
        FINISHED,
        tmp_path,
        token,
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert (
        "W&B online did not start" in output
        and "continuing offline" in output
        and KEY not in output
    )
    assert len(list(run.wandb.glob("offline-run-*/*.wandb"))) == 1
    assert_nowhere(KEY, tmp_path)


def test_a_tracker_adds_almost_no_time_to_a_step(run: RunDir, tmp_path: Path, token: str) -> None:
    """The real client, while it starts and while it works: a step only waits for a write to a file
    and a queue."""
    code = (
        "import statistics; print(statistics.median(took) * 1e6, max(took) * 1e6, "
        "file=sys.stderr)\n" + FINISHED
    )
    output = train(run, "offline", code, tmp_path, token, last=400)
    median, _ = (float(word) for word in output.splitlines()[0].split())
    assert median < 2000, "microseconds"


def test_wandb_gets_at_the_next_start_what_it_lacks_of_a_start_that_was_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while W&B was starting, after step 4; resumed from step 2."""
    run.create()
    wandb = MagicMock()
    wandb.errors.Error = ConnectionError
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (1, 2, 3, 4):
        append_json(run.metrics, {"time": step, "step": step, "loss": 5.0 - step})
        if step == 2:
            append_json(run.metrics, {"time": step, "step": 2, "val_loss": 2.5})
    wandb.init.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tracking.WandB(run, Config(), "online", {})
    wandb.init.side_effect = None
    earlier = run.metrics.stat().st_size
    append_json(run.metrics, {"time": 5, "step": 2, "val_loss": 9.0})  # of the next start

    def sent(first: int) -> list[dict[str, float]]:
        wandb.init.return_value.log.reset_mock()
        tracking.WandB(run, Config(), "online", {}, first=first, earlier=earlier)
        return [call.args[0] for call in wandb.init.return_value.log.call_args_list]

    assert sent(3) == [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "val_loss": 2.5},
    ]
    assert sent(3) == [], "once"


def test_a_damaged_id_is_replaced(run: RunDir) -> None:
    run.create()
    run.wandb_id.write_text('{"id": "../../etc"}')
    made = tracking._wandb_id(run)
    assert made.isalnum() and tracking._wandb_id(run) == made


def test_a_copy_of_a_run_is_another_run_of_wandb(run: RunDir, tmp_path: Path) -> None:
    run.create()
    first = tracking._wandb_id(run)
    moved = RunDir(tmp_path / "moved")
    run.path.rename(moved.path)
    assert tracking._wandb_id(moved) == first
    write_json(moved.wandb_id, {"id": first, "folder": str(moved.path)})  # it has started there
    tmp_path.joinpath("link").symlink_to(moved.path)
    assert tracking._wandb_id(RunDir(tmp_path / "link")) == first
    shutil.copytree(moved.path, run.path)
    second = tracking._wandb_id(run)
    assert second != first
    assert [tracking._wandb_id(moved), tracking._wandb_id(run)] == [first, second]
    write_json(run.wandb_id, {"id": first})  # of an earlier version
    assert tracking._wandb_id(run) == first


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
