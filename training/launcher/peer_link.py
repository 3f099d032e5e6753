"""The line between the supervisors of several machines while ranks run: who has failed, who is
gone, who is silent."""

from __future__ import annotations

import contextlib
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from training.core import log
from training.core.failure_kinds import GONE, SILENT
from training.core.rundir import ASKED
from training.host.placement import Topology
from training.launcher.json_socket import SILENT_S, ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks

if TYPE_CHECKING:
    from training.core.contracts.kinds import PeerKind
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

PING_S = 1.0
LATE_S = 2.5 * PING_S
STILL_S = SILENT_S - 2 * PING_S  # the ranks may have stopped a little later than the answers
# counts at most between two turns: when this supervisor was stopped itself, the others were not
# silent
TURN_S = 1.0
SETTLE_S = 6.0  # longer than the other ranks get for their last words (training.launcher.timeouts)
PAUSE_S = 0.05
SAY_AFTER_S, SAY_EVERY_S = 5.0, 30.0
NETWORK, PEER_DIED = "nccl_network", "peer_died"  # causes
UNREACHABLE = "no answer of its supervisor; the network between the machines, or the machine itself"
FROZEN = (
    "the machine answers, its supervisor does not: it is stopped, or waits for its terminal or disk"
)
# what may be a file's name, or be shown, though it comes from a network
NAME = set(string.ascii_letters + string.digits + "._-")


@dataclass(frozen=True)
class LostPeer:
    """Another machine that is not there any more."""

    node: int
    kind: PeerKind
    cause: str
    text: str  # who and why


class PeerLink(ABC):
    """One machine's end of the talk. `failed`: what another machine says of its failure, if one
    does."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.place = plan, Topology(**plan["place"])
        self.wires: dict[int, JsonSocket] = {}  # by node
        self.failed: FailureRecord | None = None
        self._kept: dict[int, list[Message]] = {}  # read too early, by node
        # on another node than the first: the exit code where node 0 was asked to stop after a
        # failure
        self.stopped = 0
        self._names: dict[int, str] = {}  # of nodes, for people
        self._turned = self._pinged = time.monotonic()
        self._silent: set[int] = set()
        self._warned: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> PeerLink:
        return self

    @abstractmethod
    def gather(self, seconds: float) -> None:
        """Meet all the others. Raises UserError after so many seconds."""

    @abstractmethod
    def go(self) -> LocalRanks:
        """When everybody is ready: the ranks of this machine. Raises UserError when a node has
        left."""

    @abstractmethod
    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        """After a failure: what all machines do next. Node 0 brings it (None: nothing more), the
        others get it; with an order all of them prepare what it says, and `go()` again. Without it
        node 0 has decided for an end, or is gone; `stopped`: the exit code where somebody has asked
        node 0 to stop."""

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
        for wire in self.wires.values():
            wire.close()

    def name(self, node: int) -> str:
        return self._names.get(node, f"node {node}")

    def there(self, node: int) -> bool:
        """Can it still be asked?"""
        return (
            node in self.wires and node not in self._silent and self.wires[node].quiet_s <= SILENT_S
        )

    def missing(self) -> str:
        """Names of those that can not."""
        return ", ".join(self.name(node) for node in sorted(self._names) if not self.there(node))

    def met(self, node: int, wire: JsonSocket, address: str, host: object) -> None:
        shown = "".join(c for c in str(host)[:64] if c in NAME)
        self.wires[node], self._names[node] = (
            wire,
            f"node {node} ({address}{f', {shown}' if shown else ''})",
        )

    def tell(self, message: Message) -> None:
        """To everybody; who is gone is not told, and is found by reading."""
        for wire in self.wires.values():
            with contextlib.suppress(ConnectionLost):
                wire.send(message)

    def watch(self, still_s: float) -> list[LostPeer]:
        """Once a turn of the loop while ranks run: pings when it is time, and gives the nodes that
        have just been found silent, each once. `still_s`: for that long all ranks of this machine
        have waited for others. A frozen supervisor on a machine that can be reached ends nothing as
        long as they do not: its ranks train. A warning says so."""
        now = time.monotonic()
        passed, self._turned = min(now - self._turned, TURN_S), now
        due = now - self._pinged > PING_S
        self._pinged = now if due else self._pinged
        found = []
        for node, wire in self.wires.items():
            wire.quiet_s += passed
            if due:
                wire.ping()
            if wire.quiet_s <= SILENT_S:
                if node in self._warned:
                    self._warned.remove(node)
                    log.info(f"{self.name(node)} answers again")
            elif node in self._silent:
                continue
            elif wire.unreachable or still_s > STILL_S:
                self._silent.add(node)
                found.append(self._silence(node, wire, wire.unreachable))
            elif node not in self._warned:
                self._warned.add(node)
                log.warning(f"{self._silence(node, wire, False).text}; the ranks go on")
        return found

    def overdue(self) -> LostPeer | None:
        """A node that does not answer as it should, though it is too early to give it up: ranks
        that wait for others, or have lost them, may have to do with that."""
        node, wire = max(self.wires.items(), key=lambda item: item[1].quiet_s, default=(0, None))
        if wire is None or wire.quiet_s <= LATE_S:
            return None
        return self._silence(node, wire, wire.unreachable)

    def settle(self, own: FailureRecord) -> FailureRecord:
        """The failure that every machine shows: of the machine where it began, as far as that can
        still say."""
        guilty = (own["rank"] is not None and not own["victim"]) or own["kind"] == ASKED
        last = time.monotonic()
        end = last + SETTLE_S
        while (
            not guilty
            and not self._sure(own)
            and self.failed is None
            and self.wires
            and time.monotonic() < end
        ):
            for node in list(self.wires):
                messages = self.read(node)
                self.keep(node, [m for m in messages if is_order(m)])
                for message in messages:
                    self.failed = cast("FailureRecord | None", message.get("record")) or self.failed
            time.sleep(PAUSE_S)
            last, passed = time.monotonic(), time.monotonic() - last
            for wire in self.wires.values():
                wire.quiet_s += passed
        if self.failed or guilty or self._sure(own):
            self.tell({"record": self.failed or own})  # the other machines know only us
        return self.failed or own

    def _sure(self, own: FailureRecord) -> bool:
        """Is the fault another machine, which will say nothing more? A silent one only when it has
        been silent for long enough."""
        return own["kind"] == GONE or (own["kind"] == SILENT and bool(self.missing()))

    def lost(self, node: int) -> None:
        self.wires.pop(node).close()

    def keep(self, node: int, messages: list[Message]) -> None:
        """They are for what this machine does next: the next `read()` returns them again, first."""
        if messages:
            self._kept[node] = messages + self._kept.get(node, [])

    def read(self, node: int) -> list[Message]:
        """What this node has sent; and {"gone": Lost} of ours when its line is broken."""
        wire, kept = self.wires[node], self._kept.pop(node, [])
        try:
            return kept + wire.arrived()
        except ConnectionLost as broken:
            if kept:  # the next call finds the end again
                return kept
            self.lost(node)
            if broken.silent:
                self._silent.add(node)
                return [{"gone": self._silence(node, wire, True)}]
            gone = LostPeer(node, GONE, PEER_DIED, f"{self.name(node)} is gone: {broken}")
            return [{"gone": gone}]

    def _silence(self, node: int, wire: JsonSocket, unreachable: bool) -> LostPeer:
        # the kernel has found it
        seconds = wire.quiet_s if node in self.wires else max(wire.quiet_s, SILENT_S)
        text = (
            f"{self.name(node)} silent for {seconds:.0f} s: "
            f"{UNREACHABLE if unreachable else FROZEN}"
        )
        return LostPeer(node, SILENT, NETWORK if unreachable else PEER_DIED, text)

    def _fresh(self) -> None:
        """Before the ranks start, for the first time or again."""
        self.failed = None
        self._turned = self._pinged = time.monotonic()
        self._silent.clear()
        self._warned.clear()
        for wire in self.wires.values():
            wire.quiet_s = 0.0


def is_order(message: Message) -> bool:
    """Node 0's decision after a failure, which may arrive before this machine has noticed that all
    its ranks are gone."""
    return "again" in message or "over" in message


class Waiting:
    """Says after some seconds, and then now and then, what is waited for."""

    def __init__(self) -> None:
        self._started, self._said = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, what: str, why: str = "", level: Callable[[str], None] = log.warning) -> None:
        waited = self.seconds
        if waited - self._said > (SAY_EVERY_S if self._said else SAY_AFTER_S):
            self._said = waited
            level(f"waiting for {what} since {waited:.0f} s{f': {why}' if why else ''}")
