"""CPU starvation: is a rank slow because the machine is overloaded? The kernel counts for each
thread how long it was ready to run without a core (schedstat): such a rank is not stuck, however
long its phase takes. Without these counters no rank counts as starved."""

from __future__ import annotations

import time
from dataclasses import dataclass

from training.core.heartbeat import HeartbeatRecord
from training.watchdog.probes import procfs

# A third of a core suffices: a budget is five times the usual duration of a phase.
SHARE = 0.6  # of the time, ready to run without a core


@dataclass(frozen=True)
class _Since:
    beats: int
    at: float
    queued: dict[int, float]  # thread → seconds so far


class Starved:
    """For the ranks of one attempt, each in its current phase."""

    def __init__(self) -> None:
        self._since: dict[int, _Since] = {}

    def note(self, beat: HeartbeatRecord, pid: int) -> None:
        """Start counting; only the first call in a phase has an effect."""
        known = self._since.get(beat.rank)
        if known is None or known.beats != beat.beats:
            self._since[beat.rank] = _Since(beat.beats, time.monotonic(), queued(pid))

    def watched_s(self, beat: HeartbeatRecord) -> float:
        """For how long the current phase has been counted, in seconds."""
        known = self._since.get(beat.rank)
        return time.monotonic() - known.at if known and known.beats == beat.beats else 0.0

    def seconds(self, beat: HeartbeatRecord, pid: int) -> float:
        """Seconds that the most starved thread has waited for a core since `note`; 0 if it got
        enough CPU time."""
        known = self._since.get(beat.rank)
        if known is None or known.beats != beat.beats:
            return 0.0
        waited = max(
            (now - known.queued.get(thread, 0.0) for thread, now in queued(pid).items()),
            default=0.0,
        )
        return waited if waited > SHARE * (time.monotonic() - known.at) else 0.0


def queued(pid: int) -> dict[int, float]:
    """Thread → seconds, for the rank and its children (data-loader workers)."""
    return {
        thread: seconds
        for one in (pid, *procfs.family(pid))
        for thread, seconds in procfs.queued(one).items()
    }
