"""When something in a log happened: by the timestamps of the lines around it."""

from __future__ import annotations

import bisect
import operator

RECENT_S = 60.0
LONGEST_END_S = 900.0  # of a rank that has failed; the others wait for it in vain for 600 s (NCCL)


class LogTimes:
    """Timestamps of a log, in the order of its lines."""

    def __init__(self) -> None:
        # (offset of the line, time, whether a launcher reports a failure there)
        self._known: list[tuple[int, float, bool]] = []

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, offset: int, time: float, *, reported: bool) -> None:
        self._known.append((offset, time, reported))

    def at(self, offset: int, since: int | None = None) -> float | None:
        """Timestamp of the line at `offset`, else of the last one before it that has one; if that
        is old, of the launcher's report of a failure, where it is the next one. `since`: offset of
        the first line of the same message, whose timestamp is that of all."""
        index = bisect.bisect_right(self._known, offset, key=operator.itemgetter(0))
        place, time, _ = self._known[index - 1] if index else (-1, None, False)
        if place < (offset if since is None else since) and index < len(self._known):
            _, after, reported = self._known[index]
            if reported and (time is None or after - time > RECENT_S):
                return after
        return time

    def reported_late(self, offset: int, last: int) -> bool:
        """Whether the launcher's report of a failure is the next timestamp after the line at
        `last`, and is too late for a failure at the time of the line at `offset`."""
        index = bisect.bisect_right(self._known, last, key=operator.itemgetter(0))
        _, after, reported = self._known[index] if index < len(self._known) else (0, 0.0, False)
        time = self.at(offset)
        return reported and time is not None and after - time > LONGEST_END_S

    def within(self, since: int, last: int) -> float | None:
        """Timestamp of the first of these lines that has one."""
        index = bisect.bisect_left(self._known, since, key=operator.itemgetter(0))
        found = self._known[index][:2] if index < len(self._known) else (last + 1, 0.0)
        return found[1] if found[0] <= last else None

    def from_(self, offset: int) -> float | None:
        """Timestamp of the first line from `offset` on that has one."""
        index = bisect.bisect_left(self._known, offset, key=operator.itemgetter(0))
        return self._known[index][1] if index < len(self._known) else None
