"""The processes of a script that get its stop signals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

from training.watchdog import discovery, wrapped
from training.watchdog.probes import procfs
from training.watchdog.probes.signal_masks import catches, ignores


def targets(started: Mapping[int, int], number: int, *, alone: bool) -> dict[int, set[int]]:
    """PID of a rank → the processes that its signals `number` are for: a shell script or another
    program that waits for the training would end without it, or not pass them on. Data-loader
    workers and services get none: the training ends them itself. `started`: rank → PID; `alone`:
    the only rank of the run, which may have started others."""
    trainings, found = wrapped.trainings(started), dict[int, set[int]]()
    for rank, pid in started.items():
        own = set[int]()
        if alone:
            own.update(discovery.own_ranks(pid, settled=True).ranks.values())
        starter = discovery.python_of(pid)
        family = {starter, trainings[rank], *own}
        # At SIGINT the ranks of mp.spawn are joined, as from a terminal. Another signal would end
        # the program that has started them, and its end those that save.
        if own and starter not in own and number != signal.SIGINT and not catches(starter, number):
            family.discard(starter)
        if number == signal.SIGINT:  # a script continues if only its child gets it
            family.add(pid)
        elif has_trap(pid, starter, number):
            family = {pid}
        # a launcher that gives its ranks groups of their own passes signals on itself
        found[pid] = {one for one in family if in_group(one, pid)} or {pid}
    return found


def has_trap(script: int, training: int, number: int) -> bool:
    """Does a shell script act on this signal while its training runs? Only in the background, where
    SIGQUIT is ignored: else a trap has to wait for the end of the training. Because of a trap for
    EXIT bash catches all signals."""
    own = catches(script, number) and not catches(script, signal.SIGSYS)
    return script != training and own and ignores(training, signal.SIGQUIT)


def in_group(pid: int, group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == group
    return False


class AskedProcesses:
    """Those that have got a stop signal, and those that get it from a shell script's own trap."""

    def __init__(self) -> None:
        self._asked: dict[int, set[int]] = {}  # PID of a rank → PIDs
        self._watched: dict[int, set[int]] = {}

    def __contains__(self, pid: int) -> bool:
        """Has this rank got it, or a process below it?"""
        return pid in self._asked

    def new(self, found: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """Those among `found` (see targets) that have not got it. A shell script that starts
        another program, such as the next seed, gets it with that one."""
        new = dict[int, set[int]]()
        for pid, processes in found.items():
            known = self._asked.setdefault(pid, set())
            # alone, the script does what comes after the training, such as a copy of its files
            if further := processes - known - ({pid} if known else set()):
                again = known and not procfs.is_python(pid)
                new[pid] = further | ({pid} if again else set())
                known |= new[pid]
        return new

    def watch(self, pid: int, training: int) -> None:
        """`training`: the process that trains below this rank."""
        self._watched.setdefault(pid, set()).add(training)

    def outlive(self, pid: int) -> bool:
        """Do some of them still run in the group of this rank, which has ended?"""
        if pid not in self._asked:
            return False
        known = (self._asked[pid] | self._watched.get(pid, set())) - {pid}
        return any(procfs.lives(one) and in_group(one, pid) for one in known)
