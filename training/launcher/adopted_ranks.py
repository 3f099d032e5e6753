"""Exits of the ranks that a watched command has started, which only that command can wait for."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Mapping
from typing import NamedTuple

from training.watchdog.probes import procfs

# A launcher ends the other ranks as soon as it has waited for a failed one: those that outlive it
# for that long show that its status was 0.
REAPED_S = 0.2


class Exit(NamedTuple):
    """`status`: None where the launcher has waited for it already."""

    rank: int
    at: float
    status: int | None


class AdoptedRanks:
    """The order of their exits. `selector`: of the attempt, whose loop notices them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._running: dict[int, tuple[int, int]] = {}  # pidfd → rank, PID
        self._known: dict[int, int] = {}  # rank → PID
        self._exits: list[Exit] = []

    def follow(self, ranks: Mapping[int, int]) -> None:
        """`ranks`: rank → PID of those that run."""
        if any(self._known.get(rank, pid) != pid for rank, pid in ranks.items()):
            self.close()  # the launcher has started them again
        for rank, pid in ranks.items():
            if rank in self._known:
                continue
            self._known[rank] = pid
            # Else there is no order: it has exited already, or there are no pidfds, as in conda's
            # Python, on an old kernel or in a sandbox.
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
                self._running[pidfd] = rank, pid
                self._selector.register(pidfd, selectors.EVENT_READ, self._on_exit)

    def left_first(self) -> int | None:
        """The rank that has exited with status 0 before all others."""
        if len(self._exits) + len(self._running) < len(self._known) or not self._exits:
            return None
        first, after = self._exits[0], (*self._exits[1:], None)[0]
        if first.status is None:
            until = after.at if after else time.monotonic()
            return first.rank if until - first.at > REAPED_S else None
        return first.rank if first.status == 0 else None

    def close(self) -> None:
        for pidfd in self._running:
            self._selector.unregister(pidfd)
            os.close(pidfd)
        for known in (self._running, self._known, self._exits):
            known.clear()

    def _on_exit(self, pidfd: int) -> None:
        rank, pid = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._exits.append(Exit(rank, time.monotonic(), procfs.exit_status(pid)))
