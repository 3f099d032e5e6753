"""The entrance of the machine that coordinates several: it answers questions of other machines and
admits those that join."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import TYPE_CHECKING

from training.core import log
from training.core.messages import msg
from training.core.plain_text import one_line
from training.launcher import admission
from training.launcher.invitation import CONTINUED, Invitations
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import ANSWER_S, Listener
from training.launcher.peer_link import LATE_S, PeerLink, replica_port

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

SHOWN = 1000  # characters of what an unknown program has sent
PRESENT_S = 1.0  # for the answer of a machine whose number another one has, too


class Reception(PeerLink):
    """With `--min_ranks` a machine that was lost joins while ranks run, waits until the run takes
    it back (`waiting`, `ready_again`), and gets the order for the restart like the others."""

    _listener: Listener

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._own = self.place.node_rank
        self._elastic, self.secret = "elastic" in plan, secrets.token_hex(32)
        self.absent: list[int] = []  # machines that the first start does not wait for
        self.waiting: dict[int, JsonSocket] = {}  # machines that may join, by node
        self._ready_again: set[int] = set()
        self.apart: dict[int, set[int]] = {}  # by machine that was left out, those it did not reach
        self._listening: dict[int, int] = {}  # port at which another machine listens, by node
        self.shares: dict[int, bool] = {}  # has a machine the same disk? By node
        self._ready: set[int] = set()
        # a machine that sees this token in the run directory has the same disk
        self.token = plan["launch"]
        self._begun = False
        self._invitations: Invitations | None = None  # where node 0 is lost

    @property
    def store(self) -> socket.socket:
        """The listening socket."""
        return self._listener.store

    @property
    def machines(self) -> dict[int, tuple[str, int]]:
        return {
            node: (self.addresses[node], self._listening.get(node, self.port))
            for node in sorted(self.wires)
            if node in self._listening or not self._elastic
        }

    @property
    def _closed(self) -> bool:
        """Are the machines of the first start settled? Others may join later."""
        return self._begun or bool(self.absent)

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
        elif not self._closed and message.get("want") == "join" and not refused:
            refused = self._second(message["node"], self.shown(peer, message.get("host")))
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

    def _second(self, node: int, place: str) -> list[str]:
        """The reason against another machine with the number of one that still answers; the same
        one may have been restarted."""
        present = self.wires.get(node)
        if not present or place == self.place_of(node) or not present.answers(PRESENT_S):
            return []
        there = self.place_of(node)
        return [msg("launcher.nodes.same_number", there=there, place=place)]

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
    def ready_again(self) -> tuple[int, ...]:
        """Machines that were lost and have joined again, with their data prepared, and that reach
        all others."""
        unreached = {node for node, others in self.apart.items() if others & self.wires.keys()}
        return tuple(sorted(self._ready_again - unreached))
