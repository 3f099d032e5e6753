"""Connections between the supervisors of several machines while ranks run: failed, lost and silent
machines."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from training.core import cause_ids, log
from training.core.failure_kinds import GONE, SILENT
from training.core.messages import msg
from training.core.rundir import ASKED, NAME
from training.diagnose.exception_cause import DRIVER_S
from training.host import process
from training.host.placement import Topology
from training.launcher.json_socket import SILENT_S, ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks
from training.launcher.same_settings import facts
from training.plan import sent_run
from training.watchdog.rank_exit import DIED, ERROR

if TYPE_CHECKING:
    from training.core.contracts.kinds import PeerKind
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

PING_S = 1.0
LATE_S = 2.5 * PING_S
STILL_S = SILENT_S - 2 * PING_S  # the ranks may have stopped slightly later than the answers
# counted at most between two turns: while this supervisor was stopped itself, the others were not
# silent
TURN_S = 1.0
SETTLE_S = 6.0  # longer than the grace of the other ranks; a machine whose ranks save reports that
PAUSE_S = 0.05
# Between two starts a healthy machine may settle the failure; in a pause it is not silent.
BETWEEN_STARTS_S = 60.0
UNREACHABLE = msg("launcher.nodes.unreachable")
FROZEN = msg("launcher.nodes.frozen")


class RunEnded(Exception):
    """The run has ended before this machine could join it; `code`: exit code of the run."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Stopped(Exception):
    """A stop signal before the start or between two attempts, to this machine or another one;
    `number`: the signal; `node`: the other machine."""

    def __init__(self, number: int, node: int | None = None) -> None:
        super().__init__(number)
        self.number, self.node = number, node


@dataclass(frozen=True)
class LostPeer:
    """A machine that has disconnected or is silent."""

    node: int
    kind: PeerKind
    cause: str
    text: str  # machine and reason


class PeerLink(ABC):
    """One machine's end of the connections. `failed`: the failure record of another machine, if it
    has sent one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.place = plan, Topology(**plan["place"])
        # where the command of node 0 listens; unknown to a machine that joined after a takeover
        place = self.place
        self.first_at = None if place.leader else (place.master_addr, place.master_port)
        self.port = 0  # at which a machine that coordinates listens
        # read now: restarts change the plan, the first failure removes the resumed one, and a lost
        # machine joins with the command of the start
        self.facts, self.resumed = facts(plan), sent_run.of(plan)
        self.wires: dict[int, JsonSocket] = {}  # by node
        self.failed: FailureRecord | None = None
        self._kept: dict[int, list[Message]] = {}  # read too early, by node
        # on a machine that does not coordinate: the exit code where that one was asked to stop
        # after a failure
        self.stopped = 0
        self._places: dict[int, str] = {}  # by node: ' (address, host)'
        self.addresses: dict[int, str] = {}  # as seen from here, by node
        self._turned = self._pinged = time.monotonic()
        self._leaving_at = -PING_S  # when it was last reported that ranks save
        self._silent: set[int] = set()
        self._warned: set[int] = set()
        self._stack = ExitStack()
        self.lost_peer: LostPeer | None = None  # a machine that was lost before a restart
        # stop signal that another machine got between two attempts, where this one coordinates or
        # may take over
        self.asked: int | None = None
        # for the copies to a machine with its own disk (training.launcher.replica): the secret of
        # the launch, and by node where they are received
        self.secret = ""
        self.replica_ports: dict[int, int] = {}
        self._asked_node: int | None = None
        # with `--rejoin`, of this start of the ranks: the newest checkpoint that the machine which
        # coordinates has named to this one, and there the lost ranks whose GPUs passed a test
        self.saved = ""
        self.works: set[int] = set()  # by planned number
        # there: by node, the machines that it does not reach any more (training.launcher.reach)
        self.cuts: dict[int, set[int]] = {}
        self.cut = False  # the ranks are ended because two machines do not reach each other

    def __enter__(self) -> PeerLink:
        return self

    def between_starts_s(self) -> float:
        """How long another machine may take between two starts."""
        return max(float(self.plan["config"]["rendezvous_timeout"]), BETWEEN_STARTS_S)

    @property
    @abstractmethod
    def machines(self) -> dict[int, tuple[str, int]]:
        """Where the other machines listen, by node; without `--min_ranks` they do not, and refuse
        connections at this port."""

    @abstractmethod
    def gather(self, seconds: float) -> None:
        """Connect to all other machines. Raises UserError after `seconds`."""

    @abstractmethod
    def go(self) -> LocalRanks | None:
        """Wait until all machines are ready; the ranks of this machine. None: another order is to
        be decided on, because a machine was lost. Raises UserError when a node has disconnected,
        RunEnded, and Stopped when another machine was asked to stop."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """This stop signal has arrived before the start or between two attempts: the other machines
        end too."""

    @abstractmethod
    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        """After a failure: the next order for all machines. The one that coordinates provides it
        (None: the run ends), the others receive it; with an order all of them apply it and `go()`
        again. Without one, that machine has ended the run or is lost; `stopped`: the exit code
        where it was asked to stop."""

    def dismiss(self, code: int) -> None:
        """Where this machine coordinates, at the end of the run: machines that wait to join it end
        too."""
        return

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
        for wire in self.wires.values():
            wire.close()

    def name(self, node: int) -> str:
        return msg("launcher.nodes.name", node=node, place=self.place_of(node))

    def place_of(self, node: int) -> str:
        """' (address, host)'; '' before the node has joined."""
        return self._places.get(node, "")

    def there(self, node: int) -> bool:
        """Is it connected and responsive?"""
        return (
            node in self.wires and node not in self._silent and self.wires[node].quiet_s <= SILENT_S
        )

    def quiet(self, node: int) -> bool:
        """Does it answer late, or not at all?"""
        return node not in self.wires or self.wires[node].quiet_s > LATE_S

    def missing(self) -> list[int]:
        """The machines that are not."""
        return [node for node in sorted(self.members) if not self.there(node)]

    @property
    def members(self) -> Collection[int]:
        """The other machines that are to be connected to this one."""
        return self._places

    def names(self, nodes: Sequence[int]) -> str:
        return ", ".join(map(self.name, nodes))

    def met(self, node: int, wire: JsonSocket, address: str, host: object) -> None:
        self.wires[node], self.addresses[node] = wire, address
        self._places[node] = self.shown(address, host)

    @staticmethod
    def shown(address: str, host: object) -> str:
        name = "".join(c for c in str(host or "")[:64] if c in NAME)
        return f" ({address}, {name})" if name else f" ({address})"

    def send_all(self, message: Message) -> None:
        """Send to all; a lost connection is reported by the next read."""
        for wire in self.wires.values():
            with contextlib.suppress(ConnectionLost):
                wire.send(message)

    def ping(self) -> None:
        """Called repeatedly, also while this machine waits for the others after a failure: it is
        not silent."""
        if (now := time.monotonic()) - self._pinged > PING_S:
            self._pinged = now
            for wire in self.wires.values():
                wire.ping()

    def report_leaving(self) -> None:
        """Called repeatedly while ranks of a script still save after a failure: the others wait for
        the record of their machine."""
        if (now := time.monotonic()) - self._leaving_at > PING_S:
            self._leaving_at = now
            self.send_all({"leaving": True})

    def note_leaving(self) -> None:
        """Another machine reports that."""
        if self.place.leads:  # the other machines are connected to this one alone
            self.report_leaving()

    def note_stop(self, node: int, message: Message) -> None:
        """The first stop request of another machine is `asked`."""
        if not self.asked and (number := stop_request(message)):
            self.asked, self._asked_node = number, node

    def unless_asked(self) -> None:
        """Raises Stopped if another machine was asked to stop."""
        if self.asked:
            raise Stopped(self.asked, self._asked_node)

    def watch(self, still_s: float) -> list[LostPeer]:
        """Called once a turn of the loop while ranks run: send pings when due, return the nodes
        that have just become silent, each once. `still_s`: for how long all ranks of this machine
        have waited for others. A frozen supervisor on a reachable machine ends nothing before that:
        its ranks may be training. It is only warned about."""
        now = time.monotonic()
        passed, self._turned = min(now - self._turned, TURN_S), now
        self.ping()
        found = []
        for node, wire in self.wires.items():
            wire.quiet_s += passed
            if wire.quiet_s <= SILENT_S:
                if node in self._warned:
                    self._warned.remove(node)
                    log.info(msg("launcher.nodes.answers_again", name=self.name(node)))
            elif node in self._silent:
                continue
            elif wire.unreachable or still_s > STILL_S:
                self._silent.add(node)
                found.append(self._silence(node, wire, wire.unreachable))
            elif node not in self._warned:
                self._warned.add(node)
                log.warning(
                    msg("launcher.nodes.silent_warning", text=self._silence(node, wire, False).text)
                )
        return found

    def overdue(self) -> LostPeer | None:
        """A node that answers late, though too early to count as lost: ranks that wait for others,
        or have lost them, may be affected by it."""
        known = [item for item in self.wires.items() if item[0] not in self._silent]
        node, wire = max(known, key=lambda item: item[1].quiet_s, default=(0, None))
        if wire is None or wire.quiet_s <= LATE_S:
            return None
        return self._silence(node, wire, wire.unreachable)

    def settle(self, own: FailureRecord) -> FailureRecord:
        """The failure record for all machines: that of the machine where the failure began, if it
        can still send it."""
        here = self.place.node_rank
        # Only the machine of a failed rank knows the state of its GPU.
        elsewhere = own["kind"] in (DIED, ERROR) and own.get("node", here) != here
        by_rank = own["rank"] is not None and not own["victim"] and not elsewhere
        guilty = by_rank or own["kind"] == ASKED
        patience_s = SETTLE_S + (DRIVER_S if elsewhere else 0)
        last = time.monotonic()
        end = last + patience_s
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
                    self.asked = self.asked or stop_request(message)
                    if "leaving" in message:
                        self.note_leaving()
                        end = time.monotonic() + patience_s
            self.ping()
            time.sleep(PAUSE_S)
            last, passed = time.monotonic(), time.monotonic() - last
            for wire in self.wires.values():
                wire.quiet_s += passed
        if self.failed or guilty or self._sure(own):
            # the other machines are connected to one alone
            self.send_all({"record": self.failed or own})
        return self.failed or own

    def _sure(self, own: FailureRecord) -> bool:
        """Is the cause a machine that will send nothing more? A silent one only once it is
        missing."""
        silent = own["kind"] == SILENT and (self.cut or bool(self.missing()))
        return own["kind"] == GONE or silent

    def separate(self, node: int) -> None:
        """Another machine does not reach this one. Where the run can continue without it, it counts
        as silent, although it is connected."""
        self.cut = True
        if "elastic" in self.plan:
            self._silent.add(node)

    def lost(self, node: int) -> None:
        self.wires.pop(node).close()

    def forget(self, node: int) -> None:
        """The run continues without this machine."""
        self._kept.pop(node, None)
        if node in self.wires:
            self.lost(node)

    def keep(self, node: int, messages: list[Message]) -> None:
        """Keep messages for a later step: the next `read()` returns them first."""
        if messages:
            self._kept[node] = messages + self._kept.get(node, [])

    def read(self, node: int) -> list[Message]:
        """Messages of a node; {"gone": LostPeer}, made here, when its connection is broken."""
        wire, kept = self.wires[node], self._kept.pop(node, [])
        try:
            return kept + wire.arrived()
        except ConnectionLost as broken:
            if kept:  # the next call detects the broken connection again
                return kept
            self.lost(node)
            if broken.silent:
                self._silent.add(node)
                return [{"gone": self._silence(node, wire, True)}]
            gone = LostPeer(
                node,
                GONE,
                cause_ids.PEER_DIED,
                msg("launcher.nodes.lost_because", name=self.name(node), broken=broken),
            )
            return [{"gone": gone}]

    def _silence(self, node: int, wire: JsonSocket, unreachable: bool) -> LostPeer:
        # detected by the kernel
        seconds = wire.quiet_s if node in self.wires else max(wire.quiet_s, SILENT_S)
        text = msg(
            "launcher.nodes.silent",
            name=self.name(node),
            seconds=seconds,
            why=UNREACHABLE if unreachable else FROZEN,
        )
        return LostPeer(
            node, SILENT, cause_ids.NCCL_NETWORK if unreachable else cause_ids.PEER_DIED, text
        )

    def _fresh(self) -> None:
        """Reset the state before ranks start, for the first time or again."""
        self.failed = self.lost_peer = None
        self.saved, self.works, self.cuts, self.cut = "", set(), {}, False
        self._turned = self._pinged = time.monotonic()
        self._silent.clear()
        self._warned.clear()
        for wire in self.wires.values():
            wire.quiet_s = 0.0


def is_order(message: Message) -> bool:
    """An order after a failure, which may arrive before this machine has noticed that all its ranks
    have ended."""
    return "again" in message or "over" in message


def replica_port(message: Message) -> int:
    """Where a machine that is ready receives copies; 0: nowhere. It comes from a network."""
    port = message.get("replica")
    return port if isinstance(port, int) and 0 < port < 65536 else 0


def stop_request(message: Message) -> int | None:
    """The stop signal that another machine got; None without one: it comes from a network."""
    number = message.get("asked")
    return number if isinstance(number, int) and number in process.STOP_SIGNALS else None
