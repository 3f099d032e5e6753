"""The processes of a script that get its stop signals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

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
        starter = discovery.python_of(pid)
        # a launcher that gives its ranks groups of their own passes signals on itself
        own = {one for one in _own_ranks(pid, alone) if in_group(one, pid)}
        family = {starter, trainings[rank], *own}
        # At SIGINT the ranks of mp.spawn are joined, as from a terminal. Another signal would end
        # the program that has started them, and its end those that save.
        if own and starter not in own and number != signal.SIGINT and not catches(starter, number):
            family.discard(starter)
        if number == signal.SIGINT:  # a script continues if only its child gets it
            family.add(pid)
        elif has_trap(pid, starter, number):
            family = {pid}
        found[pid] = {_in_group_above(one, pid) for one in family}
    return found


def _in_group_above(one: int, group: int) -> int:
    """This process, or the one that has started it in a group of its own and passes signals on."""
    while not in_group(one, group):
        process = procfs.read_process(one)
        if process is None or process.parent <= 1:
            return group
        one = process.parent
    return one


def understood(
    processes: Collection[int], number: signal.Signals
) -> list[tuple[signal.Signals, set[int]]]:
    """The signal that each of them gets. Lightning and others save at TERM, but know USR1 only in
    a job in which SLURM has started the ranks: it would end them."""
    by_term = {
        one
        for one in processes
        if number == signal.SIGUSR1
        and catches(one, signal.SIGTERM)
        and not (catches(one, number) or ignores(one, number))
    }
    parts = [(number, {*processes} - by_term), (signal.SIGTERM, by_term)]
    return [one for one in parts if one[1]]


def _own_ranks(pid: int, alone: bool) -> set[int]:
    return set(discovery.own_ranks(pid, settled=True).ranks.values()) if alone else set()


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


@dataclass
class Below:
    """Processes of one rank, by PID."""

    asked: set[int] = field(default_factory=set)  # have got the signal
    spared: set[int] = field(default_factory=set)  # do not get it, see AskedProcesses.new
    by_trap: bool = False  # the trap of the script alone has got it: it signals the others
    # at the first signal: those that trained, whether with torch, and all that ran Python
    trainings: set[int] = field(default_factory=set)
    with_torch: bool = False
    before: set[int] = field(default_factory=set)


class AskedProcesses:
    """Those that have got a stop signal, and those that get it from a shell script's own trap."""

    def __init__(self) -> None:
        self._ranks = defaultdict[int, Below](Below)  # by the PID of the rank

    def __contains__(self, pid: int) -> bool:
        """Has this rank got it, or a process below it?"""
        return pid in self._ranks and bool(self._ranks[pid].asked)

    def watch(self, started: Mapping[int, int], *, alone: bool) -> None:
        """What runs below the ranks that have not got it yet. Parameters: see targets."""
        first = {rank: pid for rank, pid in started.items() if pid not in self}
        for rank, training in (wrapped.trainings(first) if first else {}).items():
            below = self._ranks[pid := first[rank]]
            below.trainings = {training, *_own_ranks(pid, alone)}
            below.with_torch = procfs.maps(training, wrapped.TORCH)
            # a shell may still become a Python program, by exec
            below.before = {one for one in procfs.family(pid) if procfs.is_python(one)}

    def new(self, found: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """Those among `found` (see targets) that have not got it. A shell script that starts
        another program, such as the next seed, gets it with that one. Alone, it does what comes
        after the training, such as a copy of its files; its trap may do that with a Python program,
        and would start again at each signal."""
        new = dict[int, set[int]]()
        for pid, processes in found.items():
            below, shell = self._ranks[pid], not procfs.is_python(pid)
            if pid not in self:
                further = processes
                if shell and processes == {pid}:
                    below.by_trap = bool(below.before)
            elif below.by_trap:
                further = set()
            else:
                further = {one for one in processes if not self._is_known(one, pid)}
                if shell and further - below.before:
                    further.add(pid)
            if further:
                new[pid] = further
                below.asked |= further
                below.spared |= _starters(further, pid)  # they end after their ranks
        return new

    def _is_known(self, one: int, pid: int) -> bool:
        """Is this the rank, or need it not get the signal any more?"""
        below = self._ranks[pid]
        if one == pid or one in below.asked | below.spared:
            return True
        # a service beside the training, such as a logger
        return below.with_torch and one in below.before and not procfs.maps(one, wrapped.TORCH)

    def outlive(self, pid: int) -> bool:
        """Do some of them still run in the group of this rank, which has ended?"""
        if pid not in self:
            return False
        known = (self._ranks[pid].asked | self._ranks[pid].trainings) - {pid}
        return any(procfs.lives(one) and in_group(one, pid) for one in known)


def _starters(processes: Iterable[int], top: int) -> set[int]:
    """The Python programs below `top` that have started these."""
    found = set[int]()
    for one in processes:
        pid = one
        while pid != top and (process := procfs.read_process(pid)):
            pid = process.parent
            found.add(pid)
    return {pid for pid in found if procfs.is_python(pid)}
