"""Trackers in the background: each has its own queue and thread, so that none waits for another.

A tracker cannot delay or stop a rank: its queue is bounded and drops records if full (metrics.jsonl
has all of them), any failure disables that tracker with one warning, one that does not answer is
reported, and the wait at the end has a time limit.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from training.core import heartbeat, log
from training.core.messages import msg
from training.core.units import clock
from training.trainer.tracking import End, Tracker, of_evaluation

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures

QUEUE_LENGTH = 10_000
POLL_S = 0.2
# at the end of a run; after a failure, when other ranks may be waiting for this one
CLOSE_S, FAILED_S = 10.0, 4.0
# additional time for a tracker that is still starting when a short run ends: W&B tries with and
# then without the network
STARTING_S = 20.0
NOTICE_S = 2.0  # a longer wait at the end is announced
# a single action that takes longer, also the start, is reported: within 10 s of its beginning
STUCK_S, WATCH_S = 9.0, 0.5
PACKAGES = ("wandb", "tensorboard")  # that start threads of their own


class TrackerThread(threading.Thread):
    """One tracker and its queue. `make` starts the tracker, in this thread."""

    def __init__(self, tracker: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self._make = tracker, make
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_LENGTH)
        self.ready = threading.Event()  # it has started or failed to start
        self.dropped = 0
        self.unclean = False  # it failed or was abandoned
        self._warned = threading.Lock()  # taken by the only warning
        self._end: End | None = None
        self._marked = False
        # monotonic time after which queued records are dropped in favour of a clean end
        self._skip_from = float("inf")
        # monotonic times at which the current action, and the one reported as stuck, began
        self._began: float | None = None
        self._stuck: float | None = None
        self._recovered = False

    def put(self, action: Callable[[Tracker], None]) -> None:
        if not self.is_alive():
            return
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self.dropped += 1

    def run(self) -> None:
        try:
            self._began = time.monotonic()
            sink = self._make()
            self._began = None
            self._serve(sink)
        except Exception as error:  # a tracker's error must not end the training
            kind = type(error).__name__
            reason = f"{kind}: {error}" if str(error) else kind
            self._give_up(msg("trainer.tracker.off", name=self.tracker, error=reason))
        finally:
            self._began = None
            self.ready.set()

    def _serve(self, sink: Tracker) -> None:
        self.ready.set()
        while (action := self._queue.get()) is not None:
            if time.monotonic() > self._skip_from:
                self.dropped += 1
            else:
                self._began = time.monotonic()
                action(sink)
                self._began = None
        assert self._end
        sink.close(self._end)

    def look(self, now: float, report: Callable[[str], None]) -> None:
        """Report, once in a run, that it does not answer, and that it does again."""
        began = self._began
        if self._stuck is None and began is not None and now - began > STUCK_S:
            self._stuck = began
            since = clock(time.time() - (now - began))
            report(
                msg("trainer.tracker.stuck", name=self.tracker, stuck_s=now - began, since=since)
            )
        elif self._stuck not in (None, began) and not (self.unclean or self._recovered):
            self._recovered = True
            log.info(msg("trainer.tracker.recovered", name=self.tracker))

    def _give_up(self, warning: str) -> None:
        self.unclean = True
        if self._warned.acquire(blocking=False):
            log.warning(warning)

    def end(self, end: End) -> None:
        """Close the tracker after the queued records. Returns at once; see `gone`."""
        self._end = end

    def gone(self) -> bool:
        """Whether the thread has ended. The end marker is retried while the queue is full."""
        if not self._marked:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                self._marked = True
        return not self.is_alive()

    def hurry(self, limit_s: float) -> None:
        """Drop records that are still queued after this time."""
        self._skip_from = time.monotonic() + limit_s

    def abandon(self, limit_s: float, later: str | None) -> None:
        """`later`: the command that completes what it has received."""
        name = self.tracker
        self._give_up(
            msg("trainer.tracker.abandoned_later", name=name, limit_s=limit_s, command=later)
            if later
            else msg("trainer.tracker.abandoned", name=name, limit_s=limit_s)
        )


class Trackers:
    """All trackers of a run. `makers`: name → function of the first step that makes a tracker;
    `report`: of a warning; `later`: name → command that sends the rest of an abandoned one."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[int], Tracker]],
        report: Callable[[str], None],
        later: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._makers, self._report, self._later = makers, report, later
        self._threads: list[TrackerThread] = []
        self._notice_at = float("inf")
        self._closing = threading.Event()

    def write(self, record: Figures) -> None:
        """Queue a record; returns at once. The first record starts the threads, since importing
        trackers takes a second."""
        if self._makers and not self._threads:
            threading.excepthook = partial(_thread_failed, threading.excepthook)
            # A resume may begin with the evaluation of the last step before it.
            first = record["step"] + of_evaluation(record)
            self._threads = [
                TrackerThread(name, partial(make, first)) for name, make in self._makers.items()
            ]
            for one in self._threads:
                one.start()
            threading.Thread(target=self._watch, name="tracker watch", daemon=True).start()
        self._put(lambda sink: sink.write(record))

    def note(self, text: str, step: int) -> None:
        """Queue an event; ignored before the first record."""
        self._put(lambda sink: sink.note(text, step))

    def flush(self) -> None:
        """Queue the flush of everything written so far."""
        self._put(lambda sink: sink.flush())

    def _put(self, action: Callable[[Tracker], None]) -> None:
        for one in self._threads:
            one.put(action)

    def _watch(self) -> None:
        """Until the trackers are closed, which has its own messages."""
        while not self._closing.wait(WATCH_S):
            for one in self._threads:
                one.look(time.monotonic(), self._report)

    def close(self, end: End, limit_s: float, starting_s: float = 0.0) -> bool:
        """End the trackers; those not done within `limit_s` are abandoned. `starting_s`: further
        time for trackers that have not started yet. Returns whether all have ended cleanly."""
        self._closing.set()
        self._notice_at = time.monotonic() + NOTICE_S
        for one in self._threads:
            one.end(end)
        self._wait(lambda one: one.gone() or one.ready.is_set(), starting_s, limit_s)
        for one in self._threads:
            one.hurry(limit_s / 2)
        late = self._wait(TrackerThread.gone, limit_s)
        for one in self._threads:
            if one.dropped:
                name, dropped = one.tracker, one.dropped
                log.warning(msg("trainer.tracker.dropped", name=name, dropped=dropped))
        for one in late:
            if one.ready.is_set():
                one.abandon(limit_s, self._later.get(one.tracker))
            else:
                one.abandon(starting_s + limit_s, None)
        return not any(one.unclean for one in self._threads)

    def _wait(
        self, over: Callable[[TrackerThread], bool], limit_s: float, further_s: float = 0.0
    ) -> list[TrackerThread]:
        """Returns those that are late. `further_s`: limit of the wait that follows this one."""
        until = time.monotonic() + limit_s
        while late := [one for one in self._threads if not over(one)]:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            if time.monotonic() > self._notice_at:
                self._notice_at = float("inf")
                names = ", ".join(one.tracker for one in late)
                log.info(msg("trainer.tracker.waiting", names=names, limit_s=left_s + further_s))
            heartbeat.current.beat("closing trackers")  # not a hang: limited by limit_s
            late[0].join(min(POLL_S, left_s))
        return late


def _thread_failed(
    others: Callable[[threading.ExceptHookArgs], object], what: threading.ExceptHookArgs
) -> None:
    """A warning for a thread that a tracker has started. `others`: the hook for all others, such as
    those of the user's task."""
    modules = (
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(what.exc_traceback)
    )
    if not any(module.partition(".")[0] in PACKAGES for module in modules):
        others(what)
        return
    log.warning(
        msg("trainer.tracker.thread_failed", kind=what.exc_type.__name__, error=what.exc_value)
    )
