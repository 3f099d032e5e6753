"""Ranks of a script after the failure of another one: those with a handler for SIGTERM may save, as
under torchrun."""

from __future__ import annotations

import functools
import time

from training.core import log
from training.core.messages import msg
from training.launcher import timeouts
from training.launcher.attempt_state import AttemptState
from training.launcher.child_processes import ChildProcesses
from training.watchdog import held

LOOK_S = 0.5  # least interval of the looks at their stacks
LOOK_TIMES = 4  # times as long as the look took


class LeavingRanks:
    """For one attempt."""

    def __init__(self, state: AttemptState, children: ChildProcesses) -> None:
        self._state, self._children = state, children
        self._end: float | None = None
        self._asked: set[int] = set()
        self._held: set[int] | None = None  # at the last look
        self._next = 0.0
        self._announced = False

    def wait(self) -> bool:
        """Called a few times a second once the grace of all ranks is over: may one of them still
        save? Those that cannot are killed."""
        if self._end is None:
            outcome = self._state.outcome
            if outcome.ours or outcome.watched or self._children.killing:
                return False
            self._end = time.monotonic() + timeouts.shutdown_s()
            failed = outcome.guilty[0] if outcome.guilty else None
            self._asked = self._children.ask_to_leave(failed)
        left = {r: pid for r, pid in self._children.pids().items() if r is not None}
        left = {rank: pid for rank, pid in left.items() if rank in self._asked}
        if not left or time.monotonic() > self._end:
            return False
        self._children.kill_all_but(self._asked)
        if self._state.link:
            self._state.link.report_leaving()
        if time.monotonic() > self._next:
            look = functools.partial(self._look, left)
            self._state.best_effort(msg("launcher.effort.leaving"), look)
        return True

    def _look(self, left: dict[int, int]) -> None:
        """A rank that waits for a lost one in a collective does not reach its handler."""
        began, before = time.monotonic(), self._held
        self._held = held.in_collectives(self._state.run.ranks, left)
        now = time.monotonic()
        self._next = now + max(LOOK_S, LOOK_TIMES * (now - began))
        self._asked -= self._held & (before or set())
        staying = sorted(self._asked & left.keys())
        if before is None or not staying or self._announced:
            return
        self._announced = True
        guilty = self._state.outcome.guilty
        of = msg("launcher.leaving.elsewhere")
        if guilty and guilty[0] is not None:
            of = f"rank {guilty[0]}"
        names = ", ".join(f"rank {rank}" for rank in staying)
        log.warning(
            msg("launcher.leaving.waits", names=names, of=of, limit_s=timeouts.shutdown_s())
        )
