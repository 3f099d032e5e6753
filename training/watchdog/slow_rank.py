"""Slow ranks of a user script: which one do the others wait for, again and again? From the times at
which the ranks, or their GPUs, arrive in the same collective, in torch's flight recorder.

Compared every minute, which takes 30 ms here and 60 ms in a thread of each rank, 0.1 % of a
core; the script needs no code for it. Only ranks on this machine are compared, since clocks differ
between machines.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.core.messages import msg
from training.watchdog.probes import graph_capture, stacks
from training.watchdog.probes.flight_recorder import Arrival, CallKey
from training.watchdog.probes.stacks import Frame, Stack, own
from training.watchdog.probes.waits import in_collective

EVERY_S = 60.0
TIMES = 2  # of --hang_timeout, where that is shorter
COSTS = 0.15  # share of the time that the others must wait for it
ALONE = 0.8  # part of all waiting that must be for the same rank
LEAST_CALLS = 5  # that others waited for
LEAST_S = 1e-3  # a wait
IN_A_ROW = 2  # comparisons with the same result
DUMPS, DUMPS_EVERY_S = 8, 0.05  # to find its place in the code, once

Arrivals = Mapping[CallKey, Arrival]


@dataclass(frozen=True)
class SlowRank:
    rank: int
    share: float  # of the time, waited for by the others
    wait_s: float  # median
    calls: int


def compare(arrivals: Mapping[int, Arrivals], after_ns: int = 0) -> SlowRank | None:
    """The rank that all others wait for, in the collectives after `after_ns`."""
    if len(arrivals) < 2:
        return None
    common = set.intersection(*(set(own) for own in arrivals.values()))
    waits: dict[int, list[float]] = {}
    ends: list[int] = []
    for key in common:
        times = [own[key].at_ns for own in arrivals.values()]
        if min(times) <= after_ns:
            continue
        (second, _), (last, rank) = sorted((o[key].late_ns, r) for r, o in arrivals.items())[-2:]
        ends.append(max(times))
        waits.setdefault(rank, []).append((last - second) / 1e9)
    if not waits:
        return None
    rank = max(waits, key=lambda r: sum(waits[r]))
    long = sorted(wait for wait in waits[rank] if wait > LEAST_S)
    total, seconds = sum(map(sum, waits.values())), (max(ends) - min(ends)) / 1e9
    if len(long) < LEAST_CALLS or sum(long) < max(COSTS * seconds, ALONE * total):
        return None
    return SlowRank(rank, min(1.0, sum(long) / seconds), long[len(long) // 2], len(long))


class SlowRankWatch:
    """For one attempt. `read`: the calls of a rank so far; `warn` gets a text and the rank, once
    for each slow rank."""

    def __init__(
        self,
        hang_timeout_s: float,
        read: Callable[[int], Arrivals | None],
        warn: Callable[[str, int], None],
    ) -> None:
        self._every_s = min(EVERY_S, TIMES * hang_timeout_s)
        self._read, self._warn = read, warn
        self._at = time.monotonic()
        self._after_ns = 0
        self._seen: tuple[int, int] = (-1, 0)  # rank, comparisons in a row
        self._reported: set[int] = set()
        self._thread: threading.Thread | None = None
        self._found: SlowRank | None = None
        self._place = ""
        self._closing = threading.Event()

    def look(self, pids: Mapping[int, int]) -> None:
        """Called often with the running ranks of this machine (rank → PID); compares in a thread,
        and reports what the last comparison has found."""
        now = time.monotonic()
        if self._thread and not self._thread.is_alive():
            self._thread = None
            self._report()
        if not self._every_s or self._thread or len(pids) < 2 or now - self._at < self._every_s:
            return
        self._at = now
        self._thread = threading.Thread(target=self._compare, args=(dict(pids),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread: processes must be started from a process with one thread."""
        self._closing.set()
        if self._thread:
            self._thread.join()

    def _compare(self, pids: Mapping[int, int]) -> None:
        if graph_capture.capturing(pids.values()):
            return
        arrivals = {rank: own for rank in pids if (own := self._read(rank)) is not None}
        self._found = compare(arrivals, self._after_ns) if len(arrivals) == len(pids) else None
        times = [arrival.at_ns for own in arrivals.values() for arrival in own.values()]
        self._after_ns = max(times, default=0)
        found = self._found
        if found is None or found.rank in self._reported:
            self._seen = (-1, 0)
            return
        before, count = self._seen
        self._seen = (found.rank, count + 1 if before == found.rank else 1)
        if self._seen[1] >= IN_A_ROW:
            self._place = self._where(pids[found.rank])

    def _where(self, pid: int) -> str:
        """Where it computes; '' where that is unknown."""
        places: Counter[Frame] = Counter()
        for _ in range(DUMPS):
            stack = stacks.dump([pid])[pid]
            main = stack.main if isinstance(stack, Stack) else None
            frame = own(main.frames) if main and not in_collective(main) else None
            places.update([frame] if frame else [])
            if self._closing.wait(DUMPS_EVERY_S):
                break
        return str(places.most_common(1)[0][0]) if places else ""

    def _report(self) -> None:
        found = self._found
        if found is None or self._seen[1] < IN_A_ROW or found.rank in self._reported:
            return
        self._reported.add(found.rank)
        self._warn(
            msg(
                "watchdog.slow_rank",
                rank=found.rank,
                share=100 * found.share,
                wait_ms=1000 * found.wait_s,
                at=msg("watchdog.at", frame=self._place) if self._place else "",
            ),
            found.rank,
        )
