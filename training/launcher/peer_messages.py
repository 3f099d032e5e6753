"""Messages of the other machines while ranks run."""

from __future__ import annotations

import functools
import selectors
from typing import TYPE_CHECKING, cast

from training.core.errors import Exit
from training.launcher import rejoin
from training.launcher.attempt_state import AttemptState
from training.launcher.first_failure import FirstFailure
from training.launcher.peer_link import LostPeer, is_order
from training.launcher.stop_requests import StopRequests

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord


class PeerMessages:
    """Reads them when the selector reports a connection, and hands each to the part it is for;
    node 0's orders are kept for later. On a single machine there are none."""

    def __init__(
        self,
        state: AttemptState,
        selector: selectors.BaseSelector,
        failure: FirstFailure,
        stop: StopRequests,
    ) -> None:
        self._state, self._selector, self._failure, self._stop = state, selector, failure, stop
        self._wires = state.link.wires if state.link else {}

    def register(self) -> None:
        for node, wire in self._wires.items():
            self._selector.register(wire, selectors.EVENT_READ, functools.partial(self._read, node))

    def read_buffered(self) -> None:
        """What arrived together with the order to start: the selector does not report it."""
        for node, wire in list(self._wires.items()):
            self._read(node, wire.fileno())

    def _read(self, node: int, fd: int) -> None:
        link = self._state.link
        assert link
        messages = link.read(node)
        link.keep(node, [m for m in messages if is_order(m)])
        for message in messages:
            if isinstance(lost := message.get("gone"), LostPeer):
                self._selector.unregister(fd)
                self._failure.of_lost_peer(lost)
            elif "ended" in message:
                self._ended(node, message["ended"])
            elif "resize" in message:
                self._resize()
            elif "saved" in message:
                link.saved = str(message["saved"])
            elif "works" in message:
                link.works |= rejoin.of_machine(self._state.plan, node, message["works"])
            elif "cut" in message:
                sent = message["cut"] if isinstance(message["cut"], list) else []
                link.cuts[node] = {other for other in link.wires if other in sent}
            elif "asked" in message:
                self._stop.from_peer(message, link.name(node))
            elif "leaving" in message:
                link.note_leaving()
            elif "ready" in message:
                continue  # sent before this machine had read the last order
            elif self._state.outcome.resized and not self._state.outcome.ours:
                self._ended(node, Exit.DONE)  # failed or not: its ranks are ended, as those here
            else:
                link.failed = cast("FailureRecord | None", message.get("record")) or link.failed
                self._failure.of_peer()

    def _resize(self) -> None:
        """Duet's ranks all stop after the same step, as agreed by themselves."""
        if self._state.outcome.ours:
            self._state.outcome.resized = True
        elif not self._state.outcome.resized:
            self._stop.for_other_ranks()

    def _ended(self, node: int, status: object) -> None:
        """The ranks of that machine have ended; `status` comes from a network."""
        others = self._state.others
        others.ended[node] = code = status if isinstance(status, int) else int(Exit.DONE)
        self._state.outcome.ended.append((None, code))
        if not others.running():
            self._state.watch.elsewhere_ended()
