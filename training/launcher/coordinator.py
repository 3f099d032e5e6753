"""The machine that coordinates several: it listens at the master address, greets the others, starts
all of them together, and lets a lost one join again (`--min_ranks`). It is node 0, or the one that
has taken over (training.launcher.succession)."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from training.core import cause_ids, log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE, SILENT
from training.core.messages import msg
from training.core.plain_text import one_line
from training.host import network, ports
from training.launcher import admission, leadership, local_ranks, seats, stop_signals
from training.launcher.admission import PROTOCOL
from training.launcher.invitation import CONTINUED, Invitations
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import ANSWER_S, Listener
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.peer_link import (
    LATE_S,
    PING_S,
    LostPeer,
    PeerLink,
    Waiting,
    replica_port,
)

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

RETRY_S = 0.25
# A script starts this many seconds after the machines for `min_ranks` have connected, as under
# torchrun (last_call_timeout of its rendezvous). Duet's own training waits --rendezvous_timeout.
LAST_CALL_S = 30.0
SHOWN = 1000  # characters of what an unknown program has sent
FIREWALL = msg("launcher.nodes.firewall")


class Coordinator(PeerLink):
    """With `--min_ranks` it keeps listening while ranks run: a machine that was lost joins, waits
    until the run takes it back (`waiting`, `ready_again`), and gets the order for the restart like
    the others. The ranks then meet at another port. `listener`, `expected`: of a machine that takes
    over, with the other machines of the run."""

    def __init__(
        self, plan: Plan, listener: Listener | None = None, expected: Collection[int] = ()
    ) -> None:
        super().__init__(plan)
        self._own = self.place.node_rank
        self._elastic, self.secret = "elastic" in plan, secrets.token_hex(32)
        # the other machines of the run
        self._expected = set(expected) or set(range(self.place.nnodes)) - {self._own}
        # the machines that all were ready for the last start, with this one
        self.confirmed = {self._own, *self._expected}
        self.absent: list[int] = []  # machines that the first start does not wait for
        self.waiting: dict[int, JsonSocket] = {}  # machines that may join, by node
        self._ready_again: set[int] = set()
        self.apart: dict[int, set[int]] = {}  # by machine that was left out, those it did not reach
        self._listening: dict[int, int] = {}  # port at which another machine listens, by node
        self.shares: dict[int, bool] = {}  # has a machine the same disk? By node
        self._ready: set[int] = set()
        # a machine that sees this token in the run directory has the same disk
        self.token = plan["launch"]
        self._begun = listener is not None
        self._invitations: Invitations | None = None  # where node 0 is lost
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

    @property
    def store(self) -> socket.socket:
        """The listening socket."""
        return self._listener.store

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

    @property
    def machines(self) -> dict[int, tuple[str, int]]:
        return {
            node: (self.addresses[node], self._listening.get(node, self.port))
            for node in sorted(self.wires)
            if node in self._listening or not self._elastic
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

    @property
    def _closed(self) -> bool:
        """Are the machines of the first start settled? Others may join later."""
        return self._begun or bool(self.absent)

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

    def _ports(self, node: int, message: Message) -> None:
        """Where another machine listens. It comes from a network."""
        self.replica_ports[node] = replica_port(message)
        if isinstance(port := message.get("listener"), int) and 0 < port < 65536:
            self._listening[node] = port

    def _greet(self, wire: JsonSocket, peer: str) -> None:
        """Answer a new connection: a question, or a node that joins."""
        # a port scanner, or a node that timed out and may reconnect
        with contextlib.suppress(ConnectionLost, TimeoutError):
            if self._answer(wire, peer, wire.receive(ANSWER_S)):
                return
        wire.close()

    def _answer(self, wire: JsonSocket, peer: str, message: Message) -> bool:
        """Has a node joined? Otherwise the connection is to be closed. Raises ConnectionLost."""
        if message.get("want") == CONTINUED:  # another run, which has lost its node 0
            return False
        node = message.get("node")
        refused = admission.refusals(message, self.plan, self._own, self.facts)
        asks = message.get("want") == "leader"  # whether this machine still coordinates
        if self._closed and isinstance(node, int) and not refused and not asks:
            present = self.wires.get(node)
            if present and present.quiet_s > LATE_S:  # it may be lost: asked again until then
                return False
            if present or node in self.waiting:
                refused = [msg("launcher.nodes.connected")]
        if refused:
            log.warning(
                msg(
                    "launcher.nodes.refused_peer",
                    peer=peer,
                    node=one_line(str(node))[:SHOWN],
                    refused=one_line("; ".join(refused))[:SHOWN],
                )
            )
            wire.send({"refused": refused})
        elif message.get("want") == "join" and isinstance(node, int):
            self.shares[node] = bool(message.get("shared", True))
            self.addresses[node] = peer
            welcome = {"joined": True, "host": socket.gethostname(), "running": self._closed}
            apart = {n: at for n, at in self.machines.items() if n in self.apart.get(node, ())}
            wire.send(welcome | {"secret": self.secret, "apart": apart})
            if self._closed:
                self._ready_again.discard(node)
                self.waiting[node] = wire
            else:
                if node in self.wires:
                    self.lost(node)  # it has been restarted
                self._ready.discard(node)
                self.met(node, wire, peer, message.get("host"))
            self._places[node] = self.shown(peer, message.get("host"))
            own = "" if message.get("shared", True) else msg("launcher.nodes.own_disk")
            log.info(msg("launcher.nodes.joined", node=node, place=self.place_of(node)) + own)
            return True
        elif message.get("want") == "resumed":
            wire.send(self.resumed)
        elif asks:
            wire.send({"launch": self.plan["launch"], "leader": self._own})
        else:
            run, launch = self.plan["run_name"], self.plan["launch"]
            wire.send({"run": run, "launch": launch, "token": self.token})
        return False

    def greet_late(self) -> None:
        """While ranks run: machines that join again. Never blocks."""
        if self.store.fileno() < 0:
            return
        for node, wire in list(self.waiting.items()):
            try:
                for message in wire.arrived():
                    if "ready" in message:
                        self._ready_again.add(node)
                        self._ports(node, message)
                    if message.get("cut") == []:  # it reaches all again
                        self.apart.pop(node, None)
            except ConnectionLost as broken:
                log.warning(msg("launcher.nodes.lost_because", name=self.name(node), broken=broken))
                self.waiting.pop(node).close()
                self._ready_again.discard(node)
        if self._invitations and 0 not in self.wires and 0 not in self.waiting:
            self._invitations.look()
        for wire, address, message in self._listener.arrived():
            with contextlib.suppress(ConnectionLost, TimeoutError):
                if self._answer(wire, address, message):
                    continue
            wire.close()

    @property
    def members(self) -> Collection[int]:
        return self._expected

    @property
    def ready_again(self) -> tuple[int, ...]:
        """Machines that were lost and have joined again, with their data prepared, and that reach
        all others."""
        unreached = {node for node, others in self.apart.items() if others & self.wires.keys()}
        return tuple(sorted(self._ready_again - unreached))

    def go(self) -> LocalRanks | None:
        waiting = Waiting()
        if self._begun and (gone := sorted(self._expected - self.wires.keys())):
            text = msg("launcher.nodes.lost", name=self.names(gone))
            self.lost_peer = LostPeer(gone[0], GONE, cause_ids.PEER_DIED, text)
            return None
        while missing := sorted(self._expected - self._ready):
            self.unless_asked()
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
