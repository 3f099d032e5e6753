"""TensorBoard and W&B, fed with rank 0's records by a separate thread.

A tracker cannot delay or stop a rank: the queue is bounded and drops records if full (metrics.jsonl
has all of them), any failure disables that tracker with one warning, and the wait at the end has a
time limit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from training.config.schema import Config
from training.core import heartbeat, log, redact, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.core.metric_units import EVALUATION

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures

QUEUE_LENGTH = 10_000
POLL_S = 0.2
# at the end of a run; after a failure, when other ranks may be waiting for this one
CLOSE_S, FAILED_S = 10.0, 4.0
WANDB_INIT_S = 10.0  # unless set by WANDB_INIT_TIMEOUT
# additional time for a tracker that is still starting when a short run ends: W&B tries with and
# then without the network
STARTING_S = 20.0


@dataclass(frozen=True)
class End:
    """End of this start of the training, with the content of summary.json."""

    code: int
    summary: Figures = field(default_factory=dict)


class Tracker(Protocol):
    def write(self, record: Figures) -> None: ...
    def note(self, text: str, step: int) -> None: ...  # an event: a restart
    def flush(self) -> None: ...  # what was written survives a kill of this process
    def close(self, end: End) -> None: ...


def figures(record: Figures) -> Iterator[tuple[str, float]]:
    """Every number of a record with a unique name; lists have one number per rank:
    compute_ms/rank0."""
    for name, value in record.items():
        if isinstance(value, list):
            yield from figures({f"{name}/rank{rank}": one for rank, one in enumerate(value)})
        elif isinstance(value, (int, float)) and name not in ("step", "time"):
            yield name, value


def of_evaluation(record: Figures) -> bool:
    return any(name.startswith(EVALUATION) for name in record)


class TensorBoard:
    """experiments/<run>/tb_logger/: one scalar per number. `first`: the first step of this start;
    later steps of an earlier start are hidden."""

    def __init__(self, run: rundir.RunDir, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = first > 1 or any(run.tensorboard.glob("events*"))
        self.writer: Any = SummaryWriter(str(run.tensorboard), purge_step=first if again else None)  # type: ignore[no-untyped-call]

    def write(self, record: Figures) -> None:
        group = "eval" if of_evaluation(record) else "train"
        for name, value in figures(record):
            self.writer.add_scalar(f"{group}/{name}", value, record["step"])

    def note(self, text: str, step: int) -> None:
        self.writer.add_text("event", text, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, end: End) -> None:
        step = int(end.summary.get("steps", 0))
        for name, value in figures(end.summary):
            self.writer.add_scalar(f"summary/{name}", value, step)
        self.writer.close()


class WandB:
    """W&B, online or offline; without login or network it falls back to offline, with one warning.
    All starts of a run have the same W&B id."""

    def __init__(
        self,
        run: rundir.RunDir,
        config: Config,
        mode: str,
        values: Mapping[str, Any],
        key: str | None = None,
    ) -> None:
        import wandb

        name, number, self.wandb = config.wandb_run or run.name, _wandb_id(run), wandb

        def begin(mode: Any) -> Any:
            more: dict[str, Any] = (
                {} if os.environ.get("WANDB_INIT_TIMEOUT") else {"init_timeout": WANDB_INIT_S}
            )
            # not by the environment, which all later child processes would inherit
            if key:
                more["api_key"] = key
            settings = wandb.Settings(console="off", silent=True, **more)
            return wandb.init(
                project=config.wandb_project,
                name=name,
                id=number,
                resume="allow",
                dir=str(run.path),
                config=public(values),
                mode=mode,
                settings=settings,
            )

        try:
            self.run = begin(mode)
        except wandb.errors.Error as error:
            log.warning(
                msg(
                    "trainer.tracker.offline",
                    error=str(error).splitlines()[0],
                    folder=shlex.quote(str(run.wandb)),
                )
            )
            wandb.teardown()  # otherwise its service considers the id in use
            self.run = begin("offline")
        # W&B's step counter cannot decrease, as it would in a run that restarts from a checkpoint.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Figures) -> None:
        self.run.log({**dict(figures(record)), "step": record["step"]})

    def note(self, text: str, step: int) -> None:
        self.run.log({"event": text, "step": step})

    def flush(self) -> None:
        """Its own process has every record already."""

    def close(self, end: End) -> None:
        self.run.summary.update(
            {name: value for name, value in end.summary.items() if value is not None}
        )
        if end.code == Exit.PREEMPTED:
            self.run.mark_preempting()  # so that W&B does not mark it as failed
        self.run.finish(exit_code=0 if end.code == Exit.INTERRUPTED else end.code)
        # end its service: a failing rank exits without Python's clean-up
        self.wandb.teardown()


def public(values: Mapping[str, Any]) -> Figures:
    """The configuration without secrets and private values."""
    shown = {name: value for name, value in values.items() if name != "notify"}
    return {
        name: redact.shown(name, value) if isinstance(value, str) else value
        for name, value in shown.items()
    }


def _wandb_id(run: rundir.RunDir) -> str:
    known = (rundir.read_json(run.wandb_id) or {}).get("id")
    if isinstance(known, str) and known.isalnum():
        return known
    made = secrets.token_hex(4)
    rundir.write_json(run.wandb_id, {"id": made})
    return made


class Trackers:
    """The queue and its thread. `makers`: name → function of the first step that makes a
    tracker."""

    def __init__(self, makers: Mapping[str, Callable[[int], Tracker]]) -> None:
        self._makers, self._started, self._dropped = makers, False, 0
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._serve, name="trackers", daemon=True)
        self._ready = threading.Event()  # every tracker has started or failed to start
        self._first = 0
        self._in = msg("trainer.tracker.a_tracker")  # the tracker that the thread is calling
        self._end: End | None = None
        self._marked = False
        # monotonic time after which queued records are dropped in favour of a clean end
        self._skip_from = float("inf")

    def write(self, record: Figures) -> None:
        """Queue a record; returns at once. The first record starts the thread, since importing
        trackers takes a second."""
        if not self._makers:
            return
        if not self._started:
            threading.excepthook = _thread_failed  # a tracker's own threads
            # A resume may begin with the evaluation of the last step before it.
            self._first, self._started = record["step"] + of_evaluation(record), True
            self._thread.start()
        self._put(lambda sink: sink.write(record))

    def note(self, text: str, step: int) -> None:
        """Queue an event; ignored before the first record."""
        if self._started:
            self._put(lambda sink: sink.note(text, step))

    def flush(self) -> None:
        """Queue the flush of everything written so far."""
        if self._started:
            self._put(lambda sink: sink.flush())

    def _put(self, action: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._dropped += 1

    def _serve(self) -> None:
        sinks: dict[str, Tracker] = {}
        for name, make in self._makers.items():
            begin = partial(self._begin, sinks, name, make)
            self._guarded(name, sinks, begin)
        self._ready.set()
        while (action := self._queue.get()) is not None:
            if time.monotonic() > self._skip_from:
                self._dropped += 1
                continue
            for name in list(sinks):
                self._guarded(name, sinks, lambda name=name, action=action: action(sinks[name]))  # type: ignore[misc]
        end = self._end
        assert end
        for name in list(sinks):
            self._guarded(name, sinks, lambda name=name: sinks[name].close(end))  # type: ignore[misc]

    def _begin(self, sinks: dict[str, Tracker], name: str, make: Callable[[int], Tracker]) -> None:
        sinks[name] = make(self._first)

    def _guarded(self, name: str, sinks: dict[str, Tracker], action: Callable[[], None]) -> None:
        self._in = name
        try:
            action()
        except Exception as error:  # a tracker's error must not end the training
            sinks.pop(name, None)
            log.warning(
                msg("trainer.tracker.off", name=name, kind=type(error).__name__, error=error)
            )

    def close(self, end: End, limit_s: float, starting_s: float = 0.0) -> None:
        """End the trackers; those not done within `limit_s` are abandoned. `starting_s`: further
        time for trackers that have not started yet."""
        if not self._started:
            return
        self._wait(self._ready.is_set, starting_s)
        self._end, self._skip_from = end, time.monotonic() + limit_s / 2
        self._wait(self._gone, limit_s)
        if self._dropped:
            log.warning(msg("trainer.tracker.dropped", dropped=self._dropped))
        if self._thread.is_alive():
            log.warning(msg("trainer.tracker.abandoned", name=self._in, limit_s=limit_s))

    def _gone(self) -> bool:
        """Whether the thread has ended. The end marker is retried while the queue is full."""
        if not self._marked:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                self._marked = True
        return not self._thread.is_alive()

    def _wait(self, over: Callable[[], bool], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not over() and time.monotonic() < until:
            heartbeat.current.beat("closing trackers")  # not a hang: limited by limit_s
            self._thread.join(min(POLL_S, limit_s))


def _thread_failed(what: threading.ExceptHookArgs) -> None:
    log.warning(
        msg("trainer.tracker.thread_failed", kind=what.exc_type.__name__, error=what.exc_value)
    )
