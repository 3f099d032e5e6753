"""Ranks that have raised an exception but not exited: a thread or an atexit function of a script
keeps their processes, or the driver of a failed GPU."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from training.core import find_run
from training.core.rundir import RunDir
from training.launcher import timeouts
from training.watchdog.probes import procfs, sockets, system_calls

LOOK_S = 5.0  # interval of the readings
# Less than this is not work: threads that only poll, the store of a process group. An upload uses
# little of a core, and where the kernel does not report TCP nothing else shows it.
IDLE_SHARE, IDLE_BYTES = 0.01, 4096  # of a core; a second


class RaisedRanks:
    """For one attempt, asked a few times a second."""

    def __init__(self, run: RunDir, *, ours: bool) -> None:
        self._run, self._ours = run, ours
        self._since: dict[int, float] = {}  # rank → when its exception was first seen
        self._work = _Work()

    def overdue(self, ranks: Mapping[int | None, int], *, elsewhere: bool) -> list[int]:
        """Those that have had their time to exit. `ranks`: rank → PID of the running ones.
        `elsewhere`: ranks of other machines run."""
        now = time.monotonic()
        for rank in ranks:
            # unlike Path.exists, not an error for a disk that does not answer
            if rank is not None and find_run.exists(self._run.rank_error(rank)):
                self._since.setdefault(rank, now)
        limit_s = timeouts.RAISED_OWN_S if self._ours else timeouts.RAISED_S
        alone = bool(ranks) and ranks.keys() <= self._since.keys() and not elsewhere
        if alone and not self._ours and self._work.idle_s(ranks.values()) <= timeouts.RAISED_S:
            limit_s = timeouts.RAISED_ALONE_S
        return [r for r, since in self._since.items() if r in ranks and now - since > limit_s]


class _Work:
    """Whether processes do anything, with all that they have started."""

    def __init__(self) -> None:
        self._looked = self._worked = 0.0
        self._seen: dict[int, tuple[float, int]] = {}  # PID → CPU seconds, bytes
        self._moved: dict[int, int] = {}  # bytes of each TCP connection

    def idle_s(self, pids: Collection[int]) -> float:
        """For how long they have done nothing; 0 at first."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            first, seconds = not self._looked, now - self._looked
            if self._read(pids, seconds) or first:
                self._worked = now
            self._looked = now
        return now - self._worked

    def _read(self, pids: Collection[int], seconds: float) -> bool:
        tree = procfs.tree()
        every = {one for pid in pids for one in (pid, *procfs.family(pid, tree))}
        read = {one: process for one in every if (process := procfs.read_process(one))}
        seen = {one: (process.cpu_s, process.io_bytes or 0) for one, process in read.items()}
        moved = {inode: one.moved for inode, one in sockets.connections(every).items()}
        cpu_s = sum(used - self._seen.get(one, (0.0, 0))[0] for one, (used, _) in seen.items())
        count = sum(total - self._seen.get(one, (0.0, 0))[1] for one, (_, total) in seen.items())
        count += sum(total - self._moved.get(inode, 0) for inode, total in moved.items())
        self._seen, self._moved = seen, moved
        return (
            cpu_s > IDLE_SHARE * seconds * len(pids)
            or count > IDLE_BYTES * seconds * len(pids)
            or any(process.state == "D" for process in read.values())  # it may write a file
            or any(map(system_calls.reads_input, pids))  # a debugger
        )
