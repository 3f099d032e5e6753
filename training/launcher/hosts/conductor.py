"""Runs the nodes to their end: passes stop signals on, ends the others when one of them cannot
start or its connection is lost, and determines the exit code. With `--min_ranks` the run continues
without a lost machine, whose launch command is started again until it joins."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from training.core import log
from training.core.console import hurry
from training.core.errors import Exit
from training.core.messages import msg
from training.host import process
from training.launcher import post_run, stop_signals
from training.launcher.hosts.console import Console, Copy
from training.launcher.hosts.node import Node

TURN_S = 0.1
KEEP_ALIVE_S = 5.0  # lib/host_agent.py waits for LOST_S
# Time for the other nodes to end by themselves when one has ended, is lost or could not start: the
# nodes of a run end together, then node 0 writes the report and notifies; they name a lost machine
# within 15 s (training.launcher.peer_link), but wait until --rendezvous_timeout for one that could
# not start.
TOGETHER_S = 30.0 + post_run.REPORT_S + post_run.NOTIFY_S
LOST_S, REFUSED_S = 20.0, 3.0
LINK_S = 60.0  # after the end of its input, the agent stops its command within 45 s
AFTER_FIRST_S = 1.0
KILLED = 128  # plus the number of the signal
# Exit codes of a run that all machines end with. With any other, this node has not started.
OF_A_RUN = (
    *(Exit.DONE, Exit.TRAINING, Exit.HANG, Exit.LEFT, Exit.PREEMPTED, Exit.INTERRUPTED),
    134,
)


# Pauses before a lost machine's launch command is started again: the first, and the longest of
# those that follow, each twice the one before. A start of STEADY_S begins with the first again.
AGAIN_S, MOST_S, STEADY_S = 5.0, 60.0, 120.0


class Conductor:
    """While entered, stop signals wait to be passed on. Enter it before the nodes start. `elastic`:
    the run continues without a lost node; `again` starts its launch command another time. `_first`:
    the node that coordinates the run, as far as it is known here."""

    def __init__(
        self, *, elastic: bool = False, again: Callable[[Node], Node] | None = None
    ) -> None:
        self._elastic, self._again, self._seen = elastic, again, set[str]()
        self._stops = process.obeyed_stops()
        # node rank → when it ended, perhaps with the run; when it is started again; pause before
        # that; when it was started last
        self._unclear: dict[int, float] = {}
        self._due: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._asked: list[int] = []
        self._requests = stop_signals.Requests()
        self._late: list[tuple[float, int]] = []  # when the other nodes get a signal
        self._ended: list[Node] = []  # in this order
        self._nodes: list[Node] = []
        self._first = 0
        self._consoles: dict[int, Console] = {}
        self._copies: list[Copy] = []
        self._signed = time.monotonic()
        self._close_at: float | None = None  # when the nodes that are left are ended
        self._closed_at: float | None = None

    def __enter__(self) -> Conductor:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._stops)
        process.outlive_terminal()
        return self

    def __exit__(self, *failure: object) -> None:
        for node in self._nodes:
            node.close()

    def add(self, node: Node) -> None:
        self._nodes.append(node)
        self._listen(node)

    def _listen(self, node: Node) -> None:
        self._started[node.rank] = time.monotonic()
        if node.output and node.errors:
            self._copies = [Copy(node.output, 1), Copy(node.errors, 2)]
        elif node.output:
            self._consoles[node.rank] = Console(node.name, node.output, self._seen)

    def run(self) -> int:
        """The exit code."""
        while left := [node for node in self._nodes if not node.ended()]:
            self._pass_on(left)
            self._start_again()
            for node in self._nodes:
                if not node.ended() or node in self._ended or node.rank in self._due:
                    continue
                if not self._can_lose(node):
                    self._ended.append(node)
                    self._look(node, left)
                elif not self._may_be_over(node):
                    self._lose(node)
            now = time.monotonic()
            if self._closed_at is None and self._close_at is not None and now > self._close_at:
                self._closed_at = now
                for node in left:
                    node.close()
            elif self._closed_at is not None and now - self._closed_at > LINK_S:
                for node in left:
                    log.warning(msg("launcher.hosts.left_behind", host=node.name))
                    node.kill()
        self._ended += [node for node in self._nodes if node not in self._ended]
        for copy in self._copies:
            copy.end()
        for console in self._consoles.values():
            console.end()
        return self._code()

    def _can_lose(self, node: Node) -> bool:
        """Does the run continue without this node? One that is rejected at its first start ends the
        run."""
        fresh = node.rank not in self._pauses
        steady = time.monotonic() - self._started[node.rank] > STEADY_S
        own = steady and node.code not in (*Exit, *OF_A_RUN)  # an error of its own
        gone = _killed(node) or own
        started = gone or node.code in OF_A_RUN
        # with any other code it has ended the run for all machines
        left = gone or node.code == Exit.LEFT
        lost = left if node.rank == self._first else started or not fresh
        return bool(self._elastic and self._left() and not self._asked and lost and node.code != 0)

    def _may_be_over(self, node: Node) -> bool:
        """Has the run ended for all machines? The first one ends last then: it writes the report
        and notifies."""
        if node.code not in OF_A_RUN or node.code == Exit.LEFT:
            return False
        now = time.monotonic()
        return now - self._unclear.setdefault(node.rank, now) < TOGETHER_S

    def _lose(self, node: Node) -> None:
        ended = self._unclear.pop(node.rank, time.monotonic())
        if self._again and self._close_at is None:
            self._plan_again(node, ended)
        else:
            self._ended.append(node)
            self._pauses[node.rank] = 0.0
            self._lost(node, msg("launcher.hosts.without", host=node.name, rank=node.rank))
        if node.rank == self._first:
            self._change_first()

    def _left(self) -> list[Node]:
        """The nodes that may be running ranks: never lost, or back for STEADY_S."""
        now = time.monotonic()
        return [
            node
            for node in self._nodes
            if not node.ended()
            and (node.rank not in self._pauses or now - self._started[node.rank] > STEADY_S)
        ]

    def _change_first(self) -> None:
        """The lowest machine that is left takes over, if it may."""
        left = self._left()
        if not left:  # the last ones have ended meanwhile: the exit code is that of one of them
            never_lost = (node.rank for node in self._nodes if node.rank not in self._pauses)
            self._first = next(never_lost, self._first)
            return
        node = left[0]
        self._first = node.rank
        node.becomes_first()
        log.info(msg("launcher.hosts.first", host=node.name, rank=node.rank))
        if node.rank in self._consoles:
            self._consoles[node.rank].whole = True

    def _plan_again(self, node: Node, ended: float) -> None:
        now, known = time.monotonic(), self._pauses.get(node.rank)
        steady = ended - self._started[node.rank] > STEADY_S
        pause_s = AGAIN_S if known is None or steady else min(2 * known, MOST_S)
        self._pauses[node.rank], self._due[node.rank] = pause_s, now + pause_s
        if known is None or steady:  # once, not at every attempt
            self._lost(node, msg("launcher.hosts.again", host=node.name, rank=node.rank))
        elif node.rank in self._consoles and node.code != Exit.LEFT:  # why it could not start
            self._consoles[node.rank].errors(or_last=True, once=True)

    def _lost(self, node: Node, text: str) -> None:
        log.warning(text)
        if node.rank in self._consoles:
            self._consoles[node.rank].errors()

    def _start_again(self) -> None:
        if self._asked or not self._left() or self._close_at is not None:
            # Their ends were noticed before: they must not hurry the nodes that are left.
            self._ended += [self._nodes[rank] for rank in (*self._due, *self._unclear)]
            self._due.clear()
            self._unclear.clear()
        for rank in [rank for rank, at in self._due.items() if time.monotonic() > at]:
            del self._due[rank]
            assert self._again
            old = self._nodes[rank]
            old.close()
            try:
                self._nodes[rank] = self._again(old)
            except OSError as error:  # no memory for a process, or the folder was deleted
                log.warning(msg("launcher.hosts.not_again", host=old.name, why=error.strerror))
                self._due[rank] = time.monotonic() + MOST_S
                continue
            self._listen(self._nodes[rank])

    def _pass_on(self, left: list[Node]) -> None:
        """Wait one turn for a stop signal. The first node gets it and passes it on. The others get
        it later as well, since nothing is passed on before the rendezvous; a request counts once
        (training.launcher.stop_requests)."""
        arrived = signal.sigtimedwait(self._stops, TURN_S)
        now = time.monotonic()
        if arrived and self._requests.is_new(arrived.si_signo):
            hurry()
            self._asked.append(arrived.si_signo)
            for console in self._consoles.values():
                console.quiet = True  # the first node shows what happens now
            self._nodes[self._first].signal(arrived.si_signo)
            self._late.append((now + AFTER_FIRST_S, arrived.si_signo))
        while self._late and now > self._late[0][0]:
            _, number = self._late.pop(0)
            for node in left:
                if node.rank != self._first:
                    node.signal(number)
        if now - self._signed > KEEP_ALIVE_S:
            self._signed = now
            for node in left:
                node.keep_alive()

    def _look(self, node: Node, left: list[Node]) -> None:
        """A node has ended while others run: they end by themselves, or are ended."""
        seconds = TOGETHER_S
        if node.link_lost:
            log.error(msg("launcher.hosts.link_lost", host=node.name, rank=node.rank))
            seconds = LOST_S
        elif node.code not in OF_A_RUN and not _killed(node) and not self._asked:
            seconds = REFUSED_S
            others = ", ".join(one.name for one in left if one is not node)
            if others:
                log.info(msg("launcher.hosts.ending", host=node.name, others=others))
        if seconds != TOGETHER_S and node.rank in self._consoles:
            self._consoles[node.rank].errors(or_last=seconds == REFUSED_S)
        at = time.monotonic() + seconds
        self._close_at = at if self._close_at is None else min(at, self._close_at)

    def _code(self) -> int:
        """That of the node that ended the run for all others, else that of the first one."""
        if self._pauses:  # it has continued without another machine
            return _shown(self._nodes[self._first])
        cause = next(
            (n for n in self._ended if n.link_lost or n.code not in OF_A_RUN), self._nodes[0]
        )
        if self._asked and not cause.link_lost and cause.code not in OF_A_RUN:
            # asked to stop before the supervisor could answer
            return int(stop_signals.code(self._asked[0]))
        if cause.code == Exit.DONE:
            cause = next((n for n in self._ended if n.code), cause)
        shown = self._nodes[0].code
        for node in self._ended:
            if node.code not in (Exit.DONE, shown) and node.rank in self._consoles:
                self._consoles[node.rank].errors()
        return _shown(cause)


def _killed(node: Node) -> bool:
    """Was its launcher killed, or the connection to it lost? Any other error that is not of a run
    means that it could not start."""
    code = node.code or 0
    return node.link_lost or code < 0 or (code > KILLED and code not in OF_A_RUN)


def _shown(node: Node) -> int:
    """Its code as that of the whole command."""
    if _killed(node):
        return int(Exit.TRAINING)
    code = int(node.code or 0)
    return code if code in (*Exit, 134) else int(Exit.RESOURCES)
