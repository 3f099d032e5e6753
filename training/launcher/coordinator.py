"""The machine that coordinates several: it listens at the master address, greets the others, starts
all of them together, and lets a lost one join again (`--min_ranks`). It is node 0, or the one that
has taken over (training.launcher.succession)."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from training.core import cause_ids, log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE, SILENT
from training.core.messages import msg
from training.host import network, ports
from training.launcher import leadership, local_ranks, seats, stop_signals
from training.launcher.admission import PROTOCOL
from training.launcher.invitation import CONTINUED, Invitations
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import Listener
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.peer_link import PING_S, LostPeer, PeerLink
from training.launcher.reception import Reception
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

RETRY_S = 0.25
# A script starts this many seconds after the machines for `min_ranks` have connected, as under
# torchrun (last_call_timeout of its rendezvous). Duet's own training waits --rendezvous_timeout.
LAST_CALL_S = 30.0
FIREWALL = msg("launcher.nodes.firewall")


class Coordinator(Reception):
    """With `--min_ranks` it keeps listening while ranks run, and they meet at another port after a
    restart. `listener`, `expected`: of a machine that takes over, with the other machines of the
    run."""

    def __init__(
        self, plan: Plan, listener: Listener | None = None, expected: Collection[int] = ()
    ) -> None:
        super().__init__(plan)
        # the other machines of the run
        self._expected = set(expected) or set(range(self.place.nnodes)) - {self._own}
        # the machines that all were ready for the last start, with this one
        self.confirmed = {self._own, *self._expected}
        self._begun = listener is not None
        self._stack.callback(self._close)
        if listener:
            self._listener, (self._bound, self.port) = listener, listener.at
            return
        self._bound = network.own_address(self.place.master_addr)
        wanted = self.port = plan["master_port"]
        self._listener = Listener(self._listen())
        if self.port != wanted:
            owner, port = ports.owner(wanted), self.port
            log.warning(msg("launcher.nodes.other_port", wanted=wanted, owner=owner, port=port))

    def _listen(self) -> socket.socket:
        store = local_ranks.listen(self._bound, self.port, 8 * self.place.nnodes)
        self.port = store.getsockname()[1]
        return store

    def _close(self) -> None:
        self._listener.close()
        for wire in self.waiting.values():
            wire.close()

    def take_over(self, line: PeerLink, machines: Mapping[int, tuple[str, int]]) -> None:
        """What this machine knew before. `machines`: where the others listen, by node."""
        self.facts, self.resumed, self.secret = line.facts, line.resumed, line.secret
        self.first_at = line.first_at
        for node, (address, port) in machines.items():
            self.addresses[node], self._listening[node] = address, port
            self._places[node] = line.place_of(node)
        if self.first_at:
            here: Message = {"leader": self._own, "at": self._listener.at}
            self._invitations = Invitations(self.first_at, {"want": CONTINUED, **here})

    def dead(self, nodes: Collection[int]) -> set[int]:
        """Those of these machines on which no supervisor runs for certain."""
        hello = {"duet": PROTOCOL, "want": "leader", "node": self._own}
        return {
            node
            for node in nodes
            if node in self._listening
            and leadership.ask((self.addresses[node], self._listening[node]), hello)[0] == "dead"
        }

    def gather(self, seconds: float) -> None:
        waiting, since_s = Waiting(), 0.0  # since when enough machines are connected
        at = f"{self.place.master_addr}:{self.port}"
        while missing := sorted(self._expected - self.wires.keys()):
            nodes, nnodes = ", ".join(map(str, missing)), self.place.nnodes
            names = msg("launcher.nodes.missing", missing=nodes, nnodes=nnodes)
            enough = self._enough()
            since_s = since_s if enough else waiting.seconds
            last_call = enough and is_script(self.plan)
            limit_s = min(since_s + LAST_CALL_S, seconds) if last_call else seconds
            if enough and waiting.seconds > limit_s:
                self.absent = missing
                return
            if waiting.seconds > limit_s:
                text = msg("launcher.nodes.not_connected", names=names, at=at, seconds=seconds)
                address = self.place.master_addr
                fix = msg("launcher.nodes.same_command", node=missing[0], master_addr=address)
                problem = Problem("nodes.missing", text, "", [fix, FIREWALL])
                raise UserError(problem, Exit.RESOURCES)
            left_s = max(0.0, limit_s - waiting.seconds)
            why = msg("launcher.last_call.soon", seconds=left_s) if enough else ""
            waiting.report(msg("launcher.nodes.missing_at", names=names, at=at), why)
            self.store.settimeout(RETRY_S)
            # none, or one that was closed at once
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection, peer = self.store.accept()
                self._greet(JsonSocket(connection), peer[0])
            for node in list(self.wires):
                lost = self._read_ready(node)
                self.unless_asked()
                if lost:
                    log.warning(msg("launcher.nodes.may_reconnect", why=lost.text))

    def _enough(self) -> bool:
        """May the run start with the machines that are connected?"""
        if not self._elastic:
            return False
        elastic = self.plan["elastic"]
        return len(seats.on(elastic, {self._own, *self.wires})) >= elastic["min_ranks"]

    def await_machine(self, why: str, waiting: Waiting, seconds: float) -> bool:
        """Too few ranks are left (`why`): has another machine joined before `waiting` takes
        `seconds`? As under torchrun."""
        known, told_s = set(self.ready_again), -PING_S
        everyone = set(range(self.place.nnodes))
        while everyone - {self._own, *self.wires, *known} and waiting.seconds <= seconds:
            waiting.report(msg("launcher.nodes.another"), why)
            if waiting.seconds - told_s >= PING_S:
                told_s = waiting.seconds
                self.hold(why)
            else:
                self._listen_to_all()
            if set(self.ready_again) - known:
                return True
            time.sleep(RETRY_S)
        return False

    def hold(self, why: str) -> None:
        """The others wait for a decision, which this machine cannot make yet (`why`)."""
        self.send_all({"undecided": why})
        self._listen_to_all()

    def _listen_to_all(self) -> None:
        """Between two starts. Raises Stopped if another machine was asked to stop."""
        if self._elastic:
            self.greet_late()
        for node in list(self.wires):
            self._read_ready(node)
        self.unless_asked()

    def _read_ready(self, node: int) -> LostPeer | None:
        """Record whether this node is ready; the loss if it is lost."""
        for message in self.read(node):
            if isinstance(lost := message.get("gone"), LostPeer):
                self._ready.discard(node)
                return lost
            if "ready" in message:
                self._ready.add(node)
                self._ports(node, message)
            self.note_stop(node, message)
        return None

    @property
    def members(self) -> Collection[int]:
        return self._expected

    def go(self) -> LocalRanks | None:
        waiting = Waiting()
        if self._begun and (gone := sorted(self._expected - self.wires.keys())):
            text = msg("launcher.nodes.lost", name=self.names(gone))
            self.lost_peer = LostPeer(gone[0], GONE, cause_ids.PEER_DIED, text)
            return None
        while missing := sorted(self._expected - self._ready):
            self.unless_asked()
            self.ping()
            waiting.report(
                msg("launcher.nodes.to_be_ready", names=", ".join(map(self.name, missing))),
                level=log.info,
            )
            if self._elastic and self._closed:
                self.greet_late()
            if self._elastic and self._begun and (lost := self._unready(missing[0], waiting)):
                self.lost_peer = lost
                return None
            readable, _, _ = select.select(list(self.wires.values()), [], [], RETRY_S)
            for node in [n for n, wire in self.wires.items() if wire in readable]:
                if not (lost := self._read_ready(node)) or self.asked:
                    continue
                if self._elastic and self._begun:
                    self.lost_peer = lost
                    return None
                self.send_all({"left": lost.text})
                why = msg("launcher.nodes.before_start", why=lost.text)
                raise UserError(Problem("nodes.lost_before_start", why), Exit.RESOURCES)
        self.unless_asked()
        if self.store.fileno() < 0:  # the ranks of the last attempt used it
            self._listener.store = self._listen()
        store = self._store_of_ranks()
        port = store.getsockname()[1]
        if is_script(self.plan) or self.plan["launcher"]["value"] == "torchrun":
            store.close()  # rank 0, or torchrun, opens the port itself
        self._fresh()
        self._begun, self.confirmed = True, {self._own, *self._expected}
        self.send_all({"go": port, "machines": self.machines})
        own = None if store.fileno() < 0 else store
        return local_ranks.of_node(self.plan, network.from_here(self._bound), port, own)

    def _unready(self, node: int, waiting: Waiting) -> LostPeer | None:
        """A supervisor that is frozen between two starts, although its kernel answers."""
        seconds = self.between_starts_s()
        if waiting.seconds <= seconds:
            return None
        self.lost(node)
        text = msg("launcher.nodes.unready", name=self.name(node), seconds=seconds)
        return LostPeer(node, SILENT, cause_ids.PEER_DIED, text)

    def _store_of_ranks(self) -> socket.socket:
        """The socket at which the ranks meet: the same port, unless machines may join at it."""
        if not self._elastic:
            return self.store
        return local_ranks.listen(self._bound, ports.beside(self.port), 8 * self.place.nnodes)

    def other_disks(self) -> bool:
        """Whether a connected machine could continue the run on a disk of its own."""
        return not all(self.shares.get(node, True) for node in self.wires)

    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        if order is not None and self._elastic:
            self._change_machines(order)
        self._ready.clear()
        self.send_all({"over": stopped} if order is None else {"again": order})
        return order

    def _change_machines(self, order: Message) -> None:
        """Leave out the machines of which all ranks are lost, and admit those that are back. One
        that is neither connected nor back has been lost since the decision: `go()` reports it."""
        elastic = self.plan["elastic"]
        away = {one["seat"] for one in order["team"]["lost"]}
        for node in range(self.place.nnodes):
            if node == self._own:
                continue
            if away.issuperset(seats.on(elastic, [node])):
                self.forget(node)
                self._expected.discard(node)
                continue
            self._expected.add(node)
            if node in self._ready_again:
                self._ready_again.discard(node)
                self.wires[node] = self.waiting.pop(node)

    def stop(self, number: int) -> None:
        over = {"over": int(stop_signals.code(number))}
        if not self._begun:
            node = self._own if self._asked_node is None else self._asked_node
            over |= {"asked": number, "node": node}
        self.send_all(over)

    def dismiss(self, code: int) -> None:
        for wire in self.waiting.values():
            with contextlib.suppress(ConnectionLost):
                wire.send({"over": code})
