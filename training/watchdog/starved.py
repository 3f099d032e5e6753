"""Is a rank slow because the machine is overloaded? The kernel counts for each thread how long it
was ready to run without a core (schedstat): such a rank is not stuck, however long its phase takes.
Without these counts nothing counts as starved."""

from __future__ import annotations

import time
from dataclasses import dataclass

from training.core.heartbeat import HeartbeatRecord
from training.watchdog.probes import procfs

# A third of a core is enough: a budget is five times what a phase usually takes.
SHARE = 0.6  # of the time, ready to run and without a core


@dataclass(frozen=True)
class _Since:
    beats: int
    at: float
    queued: dict[int, float]  # thread → seconds so far


class Starved:
    """Of the ranks of one start, each in its present phase."""

    def __init__(self) -> None:
        self._since: dict[int, _Since] = {}

    def note(self, beat: HeartbeatRecord, pid: int) -> None:
        """From now on; the first call in a phase counts."""
        known = self._since.get(beat.rank)
        if known is None or known.beats != beat.beats:
            self._since[beat.rank] = _Since(beat.beats, time.monotonic(), queued(pid))

    def watched_s(self, beat: HeartbeatRecord) -> float:
        """For how long that is known of the present phase."""
        known = self._since.get(beat.rank)
        return time.monotonic() - known.at if known and known.beats == beat.beats else 0.0

    def seconds(self, beat: HeartbeatRecord, pid: int) -> float:
        """That long the thread which waits most for a core has waited for one since `note`; 0 where
        it got enough of it."""
        known = self._since.get(beat.rank)
        if known is None or known.beats != beat.beats:
            return 0.0
        waited = max(
            (now - known.queued.get(thread, 0.0) for thread, now in queued(pid).items()),
            default=0.0,
        )
        return waited if waited > SHARE * (time.monotonic() - known.at) else 0.0


def queued(pid: int) -> dict[int, float]:
    """Of the rank's threads and those of its children (data-loader workers)."""
    return {
        thread: seconds
        for one in (pid, *procfs.family(pid))
        for thread, seconds in procfs.queued(one).items()
    }
