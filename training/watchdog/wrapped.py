"""The process that trains, inside a rank: a shell script, another program or a Python script may
have started it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from training.watchdog import spawned
from training.watchdog.probes import procfs

TORCH = "libtorch"  # in the names of torch's libraries
SEARCH_S = 1.0  # interval of the search for a rank's Python process
SETTLE_S = 10.0  # interval of the search for a rank's training beside one that may not train


def trainings(started: Mapping[int, int]) -> dict[int, int]:
    """Rank → the process that trains; `started`: rank → PID of these and no other ranks."""
    tree, pids = procfs.tree(), set(started.values())
    return {rank: _training(pid, tree, pids - {pid}) for rank, pid in started.items()}


def _training(pid: int, tree: dict[int, list[int]], others: set[int]) -> int:
    """The topmost Python process of a rank that has joined a process group; before that, the
    topmost one that has loaded torch, else the topmost one, else the rank itself. A wrapper may
    load torch too, to count GPUs; a rank may have started the `others`."""
    # without what is below the others
    own = {one: [] if one in others else children for one, children in tree.items()}
    family = (pid, *(one for one in procfs.family(pid, own) if one not in others))
    pythons = [one for one in family if procfs.is_python(one)]
    with_torch = None
    for one in pythons:  # those below the first one in a group are not read
        if procfs.maps(one, TORCH):
            if spawned.in_group(one):
                return one
            with_torch = with_torch or one
    return with_torch or next(iter(pythons), pid)


def _below_python(pid: int, top: int) -> bool:
    """Whether a Python process of the family of `top` has started this one."""
    while pid != top and (process := procfs.read_process(pid)):
        pid = process.parent
        if procfs.is_python(pid):
            return True
    return False


class TrainingProcesses:
    """For the ranks of one attempt, asked a few times a second."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # PID of a rank → of its training
        # Trainings that have joined a process group, without a Python process above them, which may
        # do so later.
        self._settled: set[int] = set()
        self._next_search = self._next_settle = 0.0

    def of(self, started: Mapping[int, int]) -> dict[int, int]:
        """Rank → the process that trains; `started`: rank → PID."""
        now, pids = time.monotonic(), set(started.values())
        tree: dict[int, list[int]] | None = None
        search, settle = now >= self._next_search, now >= self._next_settle
        if search:
            self._next_search = now + SEARCH_S
        if settle:
            self._next_settle = now + SETTLE_S
        for pid in started.values():
            known = self._found.get(pid, pid)
            missing = not procfs.lives(known) or (known == pid and not procfs.is_python(pid))
            if (search and missing) or (settle and known not in self._settled):
                tree = procfs.tree() if tree is None else tree
                known = self._found[pid] = _training(pid, tree, pids - {pid})
                joined = procfs.maps(known, TORCH) and spawned.in_group(known)
                if joined and not _below_python(known, pid):
                    self._settled.add(known)
        return {rank: self._found.get(pid, pid) for rank, pid in started.items()}
