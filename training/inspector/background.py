"""Background thread of the inspector: publishes the state of this rank and, on rank 0, analyses all
reports. Training never waits for it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .analysis import Judge
from .messages import msg
from .reporting import Finding, FindingsOutput, InspectionError
from .shared_store import SharedStore

if TYPE_CHECKING:
    from training.inspector.exchange import RankProgress

POLL_S = 0.25
SOON_S = 0.02  # while something is expected
LEAVE_S = 1.0  # for the others to stop using the store of rank 0
DROP_S = 1.0  # after the end of the process group


class Watcher(threading.Thread):
    """`state()`: current progress of this rank; `fatal(finding)`: whether it ends the training;
    `patience_s`: maximum duration of a step after another rank has run out of data."""

    def __init__(
        self,
        board: SharedStore,
        output: FindingsOutput,
        state: Callable[[], RankProgress],
        fatal: Callable[[Finding], bool],
        patience_s: float,
    ) -> None:
        super().__init__(name="inspector", daemon=True)
        self._board, self._output, self._state, self._fatal, self._patience_s = (
            board,
            output,
            state,
            fatal,
            patience_s,
        )
        self.judge: Judge | None = None
        self._queue: deque[tuple[str, Any]] = deque()
        self._wake, self._closing, self._idle = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._told: RankProgress | None = None
        self._place: tuple[object, ...] = ()
        self._since = time.monotonic()
        self._read, self._found = 0, set[tuple[object, ...]]()  # findings
        self._detached = False  # the board is no longer used
        self._grouped = dist.is_available() and dist.is_initialized()
        self._gone_since: float | None = None
        self.raised: Finding | None = None  # for the training's thread
        self.no_data: Finding | None = None  # while this rank may wait for that one
        self._waits_after = 0  # the step before the one that waits

    # Called by the training's thread

    def put(self, key: str, value: Any) -> None:
        self._idle.clear()
        self._queue.append((key, value))
        self._wake.set()

    def post(self, found: Finding) -> None:
        """Send a finding to all ranks."""
        self.put("finding", found)

    def flush(self, limit_s: float = 1.0) -> None:
        self._wake.set()
        self._idle.wait(limit_s)

    def close(self, limit_s: float) -> None:
        self._closing.set()
        self._wake.set()
        self.join(limit_s)

    # The thread

    def run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(SOON_S if self._expecting() else POLL_S)
                self._wake.clear()
                self._turn()
            self._leave()
        except dist.DistError:
            # Rank 0 and its store are gone; the launcher or watchdog reports the cause.
            self._detached = True
            self._idle.set()
            self._alone()
        except Exception as error:  # training continues without inspection
            self._output.line(msg("inspector.disabled", kind=type(error).__name__, error=error))
            self._detached = True
            self._idle.set()

    def _expecting(self) -> bool:
        return self.judge is not None and not self._detached and self.judge.outstanding

    def _turn(self) -> None:
        if not self._detached:
            self._exchange()
            if self._group_ended() or self._board.take("closing"):
                self._depart()
        self._end_if_stuck()

    def _exchange(self) -> None:
        while self._queue:
            key, value = self._queue.popleft()
            if isinstance(value, Finding):
                self.find(value)
            else:
                self._board.put(key, value)
        state = self._state()
        if state != self._told:
            self._board.put(f"state/{self._board.rank}", state)
            self._told = state
        if self.judge:
            self.judge.look(time.monotonic())
        while (told := self._board.take(f"finding/{self._read + 1}")) is not None:
            self._read += 1
            self._heard(Finding(*told))
        if not self._queue:
            self._idle.set()

    def find(self, found: Finding) -> None:
        """Announce a finding to all ranks, once for each kind and rank; of a rank without data once
        for each wait. Call in this thread."""
        wait = found.step if found.kind == "no_data" else None
        if (found.kind, found.rank, wait) not in self._found:
            self._found.add((found.kind, found.rank, wait))
            self._output.record(found)
            self._board.announce([found.kind, found.text, found.rank, found.step])

    def _heard(self, found: Finding) -> None:
        if self._board.rank == 0:
            self._output.warn(found)
        if found.kind == "no_data":
            # On a GPU the host may be some steps ahead of the one that waits.
            self.no_data = found
            self._waits_after = max(found.step or 0, self._state()["step"])
        elif self._fatal(found):
            self.raised = self.raised or found

    def _end_if_stuck(self) -> None:
        """End the process with the cause if a step waits for a rank without data: the wait cannot
        be interrupted."""
        state, now = self._state(), time.monotonic()
        place = (state["step"], state["in_step"], state["ended"])
        if place != self._place:
            self._place, self._since = place, now
        if state["step"] > self._waits_after:  # the rank has trained on
            self.no_data = None
        stuck = not state["ended"] and now - self._since > self._patience_s
        if self.no_data and stuck and self._fatal(self.no_data):
            self._output.line(
                msg(
                    "inspector.ended_process",
                    rank=self._board.rank,
                    patience_s=self._patience_s,
                    step=state["step"] + 1,
                    text=self.no_data.text,
                )
            )
            self._output.keep(InspectionError(self.no_data))
            sys.stdout.flush()
            os._exit(1)

    def _group_ended(self) -> bool:
        """Whether the script has destroyed its process group. It may create another one on the same
        port, which the inspector's reference to the store would keep in use."""
        if not self._grouped or dist.is_initialized():
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since > DROP_S

    def _leave(self) -> None:
        if not self._detached:
            self._exchange()
            self._depart()
        self._idle.set()

    def _depart(self) -> None:
        """Stop using rank 0's store before it ends; torch would log a traceback otherwise."""
        self._detached = True
        end = time.monotonic() + LEAVE_S
        if self.judge:
            limit = end + self.judge.named_s
            while self.judge.outstanding and time.monotonic() < (
                limit if self.judge.somebody_waits else end
            ):
                time.sleep(SOON_S)
                self._exchange()
            self._board.put("closing", True)
        self._board.put(f"bye/{self._board.rank}", True)
        end = time.monotonic() + LEAVE_S
        while self.judge and self._board.missing("bye") and time.monotonic() < end:
            time.sleep(SOON_S)
        self._board.close()

    def _alone(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(POLL_S)
            self._end_if_stuck()
