"""What rank 0 writes down: metrics.jsonl at once, TensorBoard and W&B from a thread of their own.

Nothing of a tracker can delay or stop a rank: the queue is bounded, a full queue drops records of the trackers (never of
metrics.jsonl), and any failure turns that tracker off with one warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from training import console, heartbeat, rundir
from training.config.schema import Config

QUEUE_LENGTH = 10_000
POLL_S = 0.2
CLOSE_S = 10.0  # for trackers at the end of the run
WANDB_INIT_S = 10.0

Record = dict[str, Any]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """experiments/<run>/tb_logger/: one scalar per number."""

    def __init__(self, run: rundir.RunDir) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.tensorboard))  # type: ignore[no-untyped-call]

    def write(self, record: Record) -> None:
        group = "eval" if "val_loss" in record else "train"
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{group}/{name}", value, record["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """W&B, online or offline; a missing login or network degrades to offline, said once."""

    def __init__(self, run: rundir.RunDir, config: Config, mode: str) -> None:
        import wandb

        name = config.wandb_run or run.name
        public = {k: v for k, v in vars(config).items() if "key" not in k}

        def begin(mode: Any) -> Any:
            settings = wandb.Settings(init_timeout=WANDB_INIT_S, console="off", silent=True)
            return wandb.init(project=config.wandb_project, name=name, dir=str(run.path), config=public, mode=mode, settings=settings)

        try:
            self.run = begin(mode)
        except wandb.errors.Error as error:
            console.warning(
                f"W&B online did not start ({str(error).splitlines()[0]}): going on offline; later: wandb sync {run.path}/wandb/*"
            )
            self.run = begin("offline")

    def write(self, record: Record) -> None:
        self.run.log({k: v for k, v in record.items() if k not in ("step", "time")}, step=record["step"])

    def close(self) -> None:
        self.run.finish()


def _thread_failed(what: threading.ExceptHookArgs) -> None:
    console.warning(f"a tracker's thread failed: {what.exc_type.__name__}: {what.exc_value}")


def wandb_mode(config: Config) -> tuple[str, str]:
    """The mode that is used and why; 'disabled' never imports wandb."""
    if config.use_dummy_wandb:
        return "disabled", "dummy"
    if config.wandb_mode != "auto":
        return config.wandb_mode, "as asked"
    if os.environ.get("WANDB_API_KEY") or _netrc_has_wandb():
        return "online", "logged in"
    return "disabled", "no login; `wandb login` or --wandb_mode=offline turns it on"


def _netrc_has_wandb() -> bool:
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


class Recorder:
    """Rank 0's writer of steps and evaluations; `write()` returns at once."""

    def __init__(self, run: rundir.RunDir, config: Config) -> None:
        self._file = os.open(run.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path, self._unwritten, self._disk_warned = run.metrics, b"", False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LENGTH)
        makers: dict[str, Callable[[], Sink]] = {}
        if config.tensorboard:
            makers["TensorBoard"] = lambda: TensorBoard(run)
        mode, reason = wandb_mode(config)
        if mode != "disabled":
            makers["W&B"] = lambda: WandB(run, config, mode)
        self.wandb = f"{mode} ({reason})"
        threading.excepthook = _thread_failed  # a tracker's own threads
        self._thread = threading.Thread(target=self._serve, args=(makers,), name="trackers", daemon=True)
        self._started = False
        self._in = "a tracker"  # where the thread is
        self._tracked = bool(makers)

    def write(self, record: Record) -> None:
        record = {"time": time.time(), **record}
        self._unwritten += (json.dumps(record) + "\n").encode()
        self._flush()
        if not self._tracked:
            return
        if not self._started:  # after the first step: importing trackers takes a second that nobody should wait for
            self._thread.start()
            self._started = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(record)

    def _flush(self) -> None:
        """Write what is not on the disk yet. On a full disk it stays in memory for the next try: training goes on, and
        nothing is lost when there is room again."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not self._disk_warned:
                console.warning(f"{self._path} can not be written ({error.strerror}): records are kept in memory until there is room")
            self._disk_warned = True

    def _serve(self, makers: dict[str, Callable[[], Sink]]) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in makers.items():
            self._guarded(name, sinks, lambda name=name, make=make: sinks.__setitem__(name, make()))  # type: ignore[misc]
        while (record := self._queue.get()) is not None:
            for name in list(sinks):
                self._guarded(name, sinks, lambda name=name, record=record: sinks[name].write(record))  # type: ignore[misc]
        for name in list(sinks):
            self._guarded(name, sinks, sinks[name].close)

    def _guarded(self, name: str, sinks: dict[str, Sink], action: Callable[[], None]) -> None:
        self._in = name
        try:
            action()
        except Exception as error:  # whatever a tracker does, the training goes on
            sinks.pop(name, None)
            console.warning(f"{name} is off for the rest of this run: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Everything written, trackers closed or given up after CLOSE_S seconds."""
        self._flush()
        os.close(self._file)
        if self._started:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=1)
            end = time.monotonic() + CLOSE_S
            while self._thread.is_alive() and time.monotonic() < end:
                heartbeat.current.beat("closing trackers")  # no hang: it has this limit
                self._thread.join(POLL_S)
            if self._thread.is_alive():
                console.warning(f"{self._in} did not finish within {CLOSE_S:g} s and is left behind; the training is complete")
