"""The processes of a script that get its stop signals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from training.watchdog import discovery, wrapped
from training.watchdog.probes import procfs


def targets(started: Mapping[int, int], *, alone: bool) -> dict[int, set[int]]:
    """PID of a rank → the processes that its signals are for: a shell script or another program
    that waits for the training would end without it, or not pass them on. A Python program that has
    started the training gets them too, as from a terminal, but data-loader workers and services,
    which the training ends itself, do not. `started`: rank → PID; `alone`: the only rank of the
    run, which may have started others."""
    trainings, found = wrapped.trainings(started), dict[int, set[int]]()
    for rank, pid in started.items():
        own = discovery.own_ranks(pid, settled=True).ranks if alone else {}
        family = {discovery.python_of(pid), trainings[rank], *own.values()}
        # a launcher that gives its ranks groups of their own passes signals on itself
        found[pid] = {one for one in family if in_group(one, pid)} or {pid}
    return found


def in_group(pid: int, group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == group
    return False


class AskedProcesses:
    """Those that have got a stop signal."""

    def __init__(self) -> None:
        self._asked: dict[int, set[int]] = {}  # PID of a rank → PIDs

    def new(self, found: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """Those among `found` (see targets) that have not got it. A shell script that starts
        another program, such as the next seed, gets it with that one."""
        new = dict[int, set[int]]()
        for pid, processes in found.items():
            known = self._asked.setdefault(pid, set())
            if further := processes - known:
                new[pid] = further | ({pid} - known if known else set())
                known |= new[pid]
        return new

    def outlive(self, pid: int) -> bool:
        """Do some of them still run in the group of this rank, which has ended?"""
        asked = self._asked.get(pid, set()) - {pid}
        return any(procfs.lives(one) and in_group(one, pid) for one in asked)
