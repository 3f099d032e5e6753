from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from training.config.schema import Config
from training.engine import record
from training.engine.record import Recorder
from training.rundir import RunDir, read_records


class Sink:
    """A tracker that keeps what it gets; `gate` holds it up."""

    def __init__(self, gate: threading.Event | None = None, fail: bool = False) -> None:
        self.got: list[dict[str, object]] = []
        self.gate, self.fail, self.closed = gate, fail, False

    def write(self, one: dict[str, object]) -> None:
        if self.gate:
            self.gate.wait()
        if self.fail:
            raise ConnectionError("no route")
        self.got.append(one)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def recorder(run: RunDir, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(record, "TensorBoard", lambda run: sink)
    return Recorder(run, Config(use_dummy_wandb=True))


def test_metrics_are_on_the_disk_at_once_and_the_tracker_gets_all(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    writer = recorder(run, sink, monkeypatch)
    for step in range(1, 4):
        writer.write({"step": step, "loss": 1 / 3})
        assert [r["step"] for r in read_records(run.metrics)][-1] == step
    assert next(iter(read_records(run.metrics)))["loss"] == 1 / 3, "full precision"
    writer.close()
    assert [r["step"] for r in sink.got] == [1, 2, 3] and sink.closed


def test_stuck_tracker_delays_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(record, "QUEUE_LENGTH", 5)
    monkeypatch.setattr(record, "CLOSE_S", 0.05)
    gate = threading.Event()
    writer = recorder(run, Sink(gate), monkeypatch)
    for step in range(50):
        writer.write({"step": step})
    assert len(list(read_records(run.metrics))) == 50
    monkeypatch.setattr(writer._queue, "put", lambda *args, **kwargs: (_ for _ in ()).throw(record.queue.Full))
    writer.close()
    assert "left behind" in capsys.readouterr().err
    gate.set()


def test_failing_tracker_is_off_after_one_warning(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    writer = recorder(run, Sink(fail=True), monkeypatch)
    for step in range(5):
        writer.write({"step": step})
    writer.close()
    assert capsys.readouterr().err.count("TensorBoard is off for the rest of this run: ConnectionError: no route") == 1
    wait_until(lambda: not writer._thread.is_alive(), 5)


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        (Config(use_dummy_wandb=True, wandb_mode="online"), {"WANDB_API_KEY": "x"}, "disabled"),
        (Config(), {"WANDB_API_KEY": "x"}, "online"),
        (Config(), {}, "disabled"),
        (Config(wandb_mode="offline"), {}, "offline"),
    ],
)
def test_wandb_mode(config: Config, environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert record.wandb_mode(config)[0] == expected
