from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from training.cli import train
from training.config.schema import Config
from training.core.errors import Exit, Problem, UserError
from training.core.rundir import VARIABLE, RunDir, append_json, read_records
from training.host import wandb_login
from training.trainer import metrics_writer, tracker_threads, tracking, worker
from training.trainer.metrics_writer import MetricsWriter
from training.trainer.tracking import End


class Sink:
    """A tracker that keeps what it gets; `gate` blocks it."""

    def __init__(self, gate: threading.Event | None = None, fail: bool = False) -> None:
        self.got: list[dict[str, object]] = []
        self.notes: list[tuple[str, int]] = []
        self.gate, self.fail = gate, fail
        self.end: End | None = None

    def write(self, one: dict[str, object]) -> None:
        if self.gate:
            self.gate.wait()
        if self.fail:
            raise ConnectionError("no route")
        self.got.append(one)

    def note(self, text: str, step: int) -> None:
        self.notes.append((text, step))

    def close(self, end: End) -> None:
        self.end = end


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def recorder(run: RunDir, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> MetricsWriter:
    monkeypatch.setattr(tracking, "TensorBoard", lambda run, first: sink)
    return MetricsWriter(run, Config(use_dummy_wandb=True))


def test_metrics_are_on_disk_at_once_and_the_tracker_gets_all_of_them(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()
    writer = recorder(run, sink, monkeypatch)
    for step in range(1, 4):
        writer.write({"step": step, "loss": 1 / 3})
        assert [r["step"] for r in read_records(run.metrics)][-1] == step
    assert next(iter(read_records(run.metrics)))["loss"] == 1 / 3, "full precision"
    writer.close({"steps": 3}, 0)
    assert [r["step"] for r in sink.got] == [1, 2, 3]
    assert sink.end == End(0, {"steps": 3})


def test_a_stuck_tracker_delays_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its queue is full after five records; each further step takes no longer than without a
    tracker."""
    monkeypatch.setattr(tracker_threads, "QUEUE_LENGTH", 5)
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.5)
    gate, took = threading.Event(), []
    writer = recorder(run, Sink(gate), monkeypatch)
    for step in range(50):
        begun = time.perf_counter()
        writer.write({"step": step})
        took.append(time.perf_counter() - begun)
    assert len(list(read_records(run.metrics))) == 50
    assert sorted(took)[45] < 0.01, "seconds"
    begun = time.monotonic()
    writer.close({}, 0)
    assert time.monotonic() - begun < tracker_threads.CLOSE_S + 20
    output = capsys.readouterr().err
    assert (
        "TensorBoard did not finish within 0.5 s and was abandoned; metrics.jsonl has everything"
        in output
    )
    assert (
        "44 records did not reach TensorBoard" in output
        or "45 records did not reach TensorBoard" in output
    )
    gate.set()


@pytest.mark.parametrize("starting", [True, False])
def test_a_tracker_that_does_not_answer_is_reported_once_with_its_recovery(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    starting: bool,
) -> None:
    monkeypatch.setattr(tracker_threads, "WATCH_S", 3600.0)  # the test itself looks
    entered, gate, flushed, sink = threading.Event(), threading.Event(), threading.Event(), Sink()

    def stuck(*_: object) -> Sink:
        entered.set()
        gate.wait()
        return sink

    monkeypatch.setattr(sink, "flush", flushed.set, raising=False)
    if not starting:
        monkeypatch.setattr(sink, "write", stuck)
    monkeypatch.setattr(tracking, "TensorBoard", stuck if starting else lambda *_: sink)
    writer = MetricsWriter(run, Config(use_dummy_wandb=True))
    writer.write({"step": 1})
    assert entered.wait(60)
    (thread,) = writer._trackers._threads

    def look(later_s: float) -> list[str]:
        thread.look(time.monotonic() + later_s, writer._trackers._report)
        return [e["code"] for e in read_records(run.events) if e["event"] == "warning"]

    assert look(tracker_threads.STUCK_S - 5) == []
    assert look(10) == look(100) == ["warning.tracker_stuck"]
    assert "[INFO]" not in capsys.readouterr().err
    gate.set()
    writer.checkpoint()
    assert flushed.wait(60)
    assert look(0) == look(0) == ["warning.tracker_stuck"]
    assert capsys.readouterr().err.count("[INFO]") == 1
    writer.close({}, 0)


def test_a_tracker_that_does_not_answer_is_noticed_without_a_further_step(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_threads, "STUCK_S", 0.1)
    monkeypatch.setattr(tracker_threads, "WATCH_S", 0.05)
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    gate = threading.Event()
    writer = recorder(run, Sink(gate), monkeypatch)
    writer.write({"step": 1})
    wait_until(lambda: any(e["event"] == "warning" for e in read_records(run.events)), 60)
    gate.set()
    writer.close({}, 0)


def test_a_tracker_that_starts_slowly_does_not_hold_back_the_other(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes what led to a checkpoint while W&B is being imported, and is complete
    although W&B never starts."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracker_threads, "STARTING_S", 0.2)
    gate, flushed, sink = threading.Event(), threading.Event(), Sink()
    monkeypatch.setattr(sink, "flush", flushed.set, raising=False)
    monkeypatch.setattr(tracking, "TensorBoard", lambda run, first: sink)
    monkeypatch.setattr(tracking, "WandB", lambda *given: gate.wait() and Sink())
    writer = MetricsWriter(run, Config(wandb_mode="offline"))
    writer.write({"step": 1})
    writer.checkpoint()
    assert flushed.wait(60) and [r["step"] for r in sink.got] == [1]
    writer.write({"step": 2})
    writer.close({"steps": 2}, 0)
    assert [r["step"] for r in sink.got] == [1, 2] and sink.end == End(0, {"steps": 2})
    warnings = [line for line in capsys.readouterr().err.splitlines() if "[WARNING]" in line]
    assert len(warnings) == 1 and "W&B" in warnings[0] and " 0.4 s " in warnings[0]
    gate.set()


@pytest.mark.parametrize("started", [True, False])
def test_wandb_that_is_abandoned_names_the_command_for_later(
    started: bool,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless it never started: then it has not received anything."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracker_threads, "STARTING_S", 60.0 if started else 0.2)
    gate = threading.Event()
    made = Sink(gate)
    monkeypatch.setattr(tracking, "WandB", lambda *given: made if started else gate.wait())
    writer = MetricsWriter(run, Config(wandb_mode="offline", tensorboard=False))
    writer.write({"step": 1})
    writer.close({}, 0)
    gate.set()
    command = f"wandb sync --include-online {run.wandb}/latest-run"
    assert capsys.readouterr().err.count(command) == started


def test_a_tracker_that_fails_after_it_was_abandoned_is_one_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    gate = threading.Event()
    writer = recorder(run, Sink(gate, fail=True), monkeypatch)
    writer.write({"step": 1})
    writer.close({}, 0)
    gate.set()
    (thread,) = writer._trackers._threads
    thread.join(60)
    assert not thread.is_alive() and not metrics_writer.exits_cleanly()
    assert capsys.readouterr().err.count("[WARNING]") == 1


def test_an_error_without_a_text_is_reported_by_its_type(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Sink()
    monkeypatch.setattr(sink, "write", lambda one: next(iter(())))
    writer = recorder(run, sink, monkeypatch)
    writer.write({"step": 1})
    writer.close({}, 0)
    assert capsys.readouterr().err.rstrip().endswith(": StopIteration")


def test_a_long_wait_at_the_end_is_announced_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.5)
    monkeypatch.setattr(tracker_threads, "STARTING_S", 0.5)
    monkeypatch.setattr(tracker_threads, "NOTICE_S", 0.0)
    gate = threading.Event()
    monkeypatch.setattr(tracking, "TensorBoard", lambda run, first: gate.wait() and Sink())
    writer = MetricsWriter(run, Config(use_dummy_wandb=True))
    writer.write({"step": 1})
    writer.close({}, 130)
    notices = [line for line in capsys.readouterr().err.splitlines() if "[INFO]" in line]
    assert len(notices) == 1 and "TensorBoard" in notices[0] and " 1 s" in notices[0]
    gate.set()


def test_a_slow_tracker_gets_the_end_before_it_has_all_records(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records still queued after half of the limit are dropped: W&B must get the end of the
    run."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 1.0)
    sink = Sink()
    monkeypatch.setattr(sink, "write", lambda one: (time.sleep(0.02), sink.got.append(one)))
    writer = recorder(run, sink, monkeypatch)
    for step in range(1000):
        writer.write({"step": step})
    writer.close({"steps": 1000}, 0)
    assert sink.end == End(0, {"steps": 1000})
    assert 0 < len(sink.got) < 100
    output = capsys.readouterr().err
    assert (
        f"{1000 - len(sink.got)} records did not reach TensorBoard" in output
        and "abandoned" not in output
    )


def test_a_short_run_waits_for_a_tracker_that_is_still_starting(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example W&B while it tries the network: what it records must not depend on how long that
    takes."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.5)
    sink = Sink()

    def slowly(run: RunDir, first: int) -> Sink:
        time.sleep(1.0)
        return sink

    monkeypatch.setattr(tracking, "TensorBoard", slowly)
    writer = MetricsWriter(run, Config(use_dummy_wandb=True))
    writer.write({"step": 1})
    writer.close({"steps": 1}, 0)
    assert sink.end == End(0, {"steps": 1}) and "abandoned" not in capsys.readouterr().err


def test_a_failing_rank_closes_its_trackers_with_a_short_wait(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Sink()
    writer = recorder(run, sink, monkeypatch)
    writer.write({"step": 1})
    metrics_writer.failed(1)
    assert sink.end == End(1)
    metrics_writer.failed(1)  # already closed: no effect

    monkeypatch.setattr(tracker_threads, "FAILED_S", 0.2)
    gate = threading.Event()
    writer = recorder(run, Sink(gate), monkeypatch)
    writer.write({"step": 2})
    begun = time.monotonic()
    metrics_writer.failed(1)
    assert time.monotonic() - begun < tracker_threads.FAILED_S + 20
    gate.set()


def test_a_user_error_in_the_middle_of_training_closes_the_trackers(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()

    def live(*_: object) -> None:
        recorder(run, sink, monkeypatch).write({"step": 1})
        raise UserError(Problem("task.failed", "no such clip"))

    monkeypatch.setattr(worker, "planned", lambda _: {})
    monkeypatch.setattr(train, "_meet", lambda *_: None)
    monkeypatch.setattr(worker, "live", live)
    left = list[int]()

    def leave(_: RunDir, code: int) -> None:
        left.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(train, "_leave", leave)
    with pytest.raises(SystemExit):
        train.main([], {VARIABLE: str(run.path), worker.SUPERVISED: "1"})
    assert left == [Exit.CONFIG]
    assert sink.end == End(Exit.CONFIG)


def test_a_failing_rank_without_a_recorder() -> None:
    metrics_writer.failed(1)


def test_trackers_get_the_events_since_the_last_start(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for event in (
        {"event": "restart", "text": "long ago"},
        {"event": "start", "step": 0},
        {"event": "checkpoint", "step": 5},
        {"event": "failure", "text": "killed by SIGKILL"},
        {"event": "restart", "text": "rank 1: started again from step 5"},
    ):
        append_json(run.events, event)
    sink = Sink()
    writer = recorder(run, sink, monkeypatch)
    for step in (6, 7):
        writer.write({"step": step})
    writer.close({}, 0)
    assert sink.notes == [
        ("failure: killed by SIGKILL", 6),
        ("restart: rank 1: started again from step 5", 6),
    ]


def test_a_failing_tracker_is_disabled_after_one_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = recorder(run, Sink(fail=True), monkeypatch)
    for step in range(5):
        writer.write({"step": step})
    writer.close({}, 0)
    assert (
        capsys.readouterr().err.count(
            "TensorBoard is off for the rest of this run: ConnectionError: no route"
        )
        == 1
    )
    (thread,) = writer._trackers._threads
    wait_until(lambda: not thread.is_alive(), 5)
    thread.look(time.monotonic() + 100, writer._trackers._report)
    assert not list(read_records(run.events)), "it is off, not stuck"


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        (Config(use_dummy_wandb=True, wandb_mode="online"), {"WANDB_API_KEY": "x"}, "disabled"),
        (Config(), {"WANDB_API_KEY": "x"}, "online"),
        (Config(), {}, "disabled"),
        (Config(wandb_mode="offline"), {}, "offline"),
    ],
)
def test_wandb_mode(
    config: Config,
    environ: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert wandb_login.wandb_mode(config)[0] == expected


def test_records_after_an_incomplete_line_are_whole(run: RunDir) -> None:
    run.metrics.write_bytes(b'{"step": 1}\n{"st')
    writer = MetricsWriter(run, Config(use_dummy_wandb=True, tensorboard=False))
    writer.write({"step": 2})
    assert [record["step"] for record in read_records(run.metrics)] == [1, 2]
