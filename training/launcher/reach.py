"""Two machines that lose each other's packets, although both are connected to the one that
coordinates: their ranks would wait for each other until --hang_timeout."""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.core import cause_ids
from training.core.failure_kinds import SILENT
from training.core.messages import msg
from training.launcher.peer_link import LostPeer

if TYPE_CHECKING:
    from training.launcher.coordinator import Coordinator

WAITED_S = 2.0  # of the ranks of this machine, beyond what is usual
EVERY_S = 10.0
ANSWER_S = 5.0  # the kernel repeats the first packet after 1 and 3 s
REPORTS_S = 3.0  # both machines of a pair notice it within this time
REACHED = (0, errno.ECONNREFUSED)


class Reach:
    """On a machine that does not coordinate. A refused connection is an answer, too: without
    `--min_ranks` nothing listens at the other end. Never blocks."""

    def __init__(self) -> None:
        self._machines: Mapping[int, tuple[str, int]] = {}
        self._tests: dict[int, socket.socket] = {}
        self._begun = 0.0
        self._reached: set[int] = set()
        self.lost: set[int] = set()  # reached before, and not now

    def begin(self, machines: Mapping[int, tuple[str, int]]) -> None:
        """A start of the ranks. `machines`: the others but the one that coordinates, by node."""
        self.close()
        self._machines, self.lost, self._begun = machines, set(), 0.0

    def begin_again(self, machines: Mapping[int, tuple[str, int]]) -> None:
        """This machine was left out because it did not reach these."""
        self.begin(machines)
        self._reached, self.lost = set(machines), set(machines)

    def look(self, waited_s: float = math.inf) -> bool:
        """Called repeatedly while ranks run: has `lost` changed? The first test only shows which
        machines can be reached. `waited_s`: how long the ranks here have waited for others."""
        now, before = time.monotonic(), set(self.lost)
        if self._tests:
            self._read(now)
        elif not self._begun or (waited_s > WAITED_S and now - self._begun > EVERY_S):
            self._begun = now
            for node, at in self._machines.items():
                self._connect(node, at)
        return self.lost != before

    def _read(self, now: float) -> None:
        _, ready, _ = select.select([], list(self._tests.values()), [], 0)
        for node, test in list(self._tests.items()):
            late = now - self._begun > ANSWER_S
            if test not in ready and not late:
                continue
            error = test.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._note(node, reached=test in ready and error in REACHED)
            self._tests.pop(node).close()

    def _connect(self, node: int, at: tuple[str, int]) -> None:
        made = socket.socket(socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        made.setblocking(False)
        error = made.connect_ex(at)
        if error in (0, errno.EINPROGRESS):
            self._tests[node] = made
            return
        made.close()  # refused, or without a route
        self._note(node, reached=error in REACHED)

    def _note(self, node: int, *, reached: bool) -> None:
        if reached:
            self._reached.add(node)
            self.lost.discard(node)
        elif node in self._reached:
            self.lost.add(node)

    def close(self) -> None:
        for test in self._tests.values():
            test.close()
        self._tests = {}


def leave_out(line: Coordinator) -> LostPeer | None:
    """Of two machines that do not reach each other, the one to continue without (`--min_ranks`): it
    is missing from now on."""
    found = to_leave_out(line.cuts)
    if not found or line.quiet(found[0]):  # it is lost itself
        return None
    node, others = found
    line.cuts.clear()
    line.separate(node)
    line.apart[node] = set(others)
    text = msg("launcher.reach.apart", name=line.name(node), others=line.names(others))
    return LostPeer(node, SILENT, cause_ids.NCCL_NETWORK, text)


def to_leave_out(cuts: Mapping[int, set[int]]) -> tuple[int, list[int]] | None:
    """The machine to leave out, and those that it does not reach: the one with the most of them,
    of two the last. `cuts`: by node, the machines that it has reported."""
    apart: dict[int, set[int]] = {}
    for node, others in cuts.items():
        for other in others - {node}:
            apart.setdefault(node, set()).add(other)
            apart.setdefault(other, set()).add(node)
    if not apart:
        return None
    node = max(apart, key=lambda one: (len(apart[one]), one))
    return node, sorted(apart[node])
