"""Node 0 of several machines: it listens at the master address, greets the others, starts all of
them together, and lets a lost one join again (`--min_ranks`)."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from training.config.schema import FIELDS, of_the_run
from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host import network, ports
from training.host.placement import LOOPBACK
from training.launcher import local_ranks, seats
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.peer_link import LATE_S, LostPeer, PeerLink, Waiting
from training.plan import sent_run

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROTOCOL = 4
MACHINES, RANKS = "number of machines", "ranks per machine"  # keys of a message
ANSWER_S = 2.0  # another program on the port does not answer at all
RETRY_S = 0.25
FIREWALL = msg("launcher.nodes.firewall")


def facts(plan: Plan) -> Message:
    """Settings that must be the same on every machine."""
    own = {
        name: value
        for name, value in plan["config"].items()
        if name in FIELDS and of_the_run(name) and name != "run_name"
    }
    script = {"script": plan["script"]["args"]} if is_script(plan) else {}
    counts = {MACHINES: plan["place"]["nnodes"], RANKS: plan["local_ranks"]}
    if "precision" in plan:  # the decision, which depends on the machine's GPUs
        own["precision"] = plan["precision"]["value"]
    return own | script | counts | {"torch": plan["torch"]}


def differences(theirs: Message, own: Message, node: int) -> list[str]:
    titles = {MACHINES: msg("launcher.nodes.machines"), RANKS: msg("launcher.nodes.ranks")}
    return [
        msg(
            "launcher.nodes.differs",
            name=titles.get(name, name),
            theirs=theirs.get(name),
            node=node,
            own=own.get(name),
        )
        for name in sorted({*theirs, *own})
        if theirs.get(name) != own.get(name)
    ]


class Coordinator(PeerLink):
    """Node 0. With `--min_ranks` it keeps listening while ranks run: a machine that was lost joins,
    waits until the run takes it back (`waiting`, `ready_again`), and gets the order for the restart
    like the others. The ranks then meet at another port."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._elastic, self._facts = "elastic" in plan, facts(plan)
        # read now: the first failure removes it, and a lost machine joins with the same command
        self._resumed = sent_run.of(plan)
        self._expected = set(range(1, self.place.nnodes))  # the other machines of the run
        self.waiting: dict[int, JsonSocket] = {}  # machines that may join, by node
        self._ready_again: set[int] = set()
        # connections without a message so far: since when, and the address
        self._unknown: list[tuple[float, JsonSocket, str]] = []
        self._begun = False
        self._bound = network.own_address(self.place.master_addr)
        wanted = self.port = plan["master_port"]
        self._listen()
        self._stack.callback(self._close)
        self._ready: set[int] = set()
        if self.port != wanted:
            log.warning(
                msg(
                    "launcher.nodes.other_port",
                    wanted=wanted,
                    owner=ports.owner(wanted),
                    port=self.port,
                )
            )

    def _listen(self) -> None:
        self.store = local_ranks.listen(self._bound, self.port, 8 * self.place.nnodes)
        self.port = self.store.getsockname()[1]

    def _close(self) -> None:
        self.store.close()
        for wire in (*self.waiting.values(), *(wire for _, wire, _ in self._unknown)):
            wire.close()

    def gather(self, seconds: float) -> None:
        waiting = Waiting()
        at = f"{self.place.master_addr}:{self.port}"
        while missing := [n for n in range(1, self.place.nnodes) if n not in self.wires]:
            names = msg(
                "launcher.nodes.missing",
                missing=", ".join(map(str, missing)),
                nnodes=self.place.nnodes,
            )
            if waiting.seconds > seconds:
                text = msg("launcher.nodes.not_connected", names=names, at=at, seconds=seconds)
                fixes = [
                    msg(
                        "launcher.nodes.same_command",
                        node=missing[0],
                        master_addr=self.place.master_addr,
                    )
                ]
                raise UserError(
                    Problem("nodes.missing", text, "", [*fixes, FIREWALL]), Exit.RESOURCES
                )
            waiting.report(msg("launcher.nodes.missing_at", names=names, at=at))
            self.store.settimeout(RETRY_S)
            with contextlib.suppress(TimeoutError):
                connection, peer = self.store.accept()
                self._greet(JsonSocket(connection), peer[0])
            for node in list(self.wires):
                if lost := self._read_ready(node):
                    log.warning(msg("launcher.nodes.may_reconnect", why=lost.text))

    def _read_ready(self, node: int) -> LostPeer | None:
        """Record whether this node is ready; the loss if it is lost."""
        for message in self.read(node):
            if isinstance(lost := message.get("gone"), LostPeer):
                self._ready.discard(node)
                return lost
            if "ready" in message:
                self._ready.add(node)
        return None

    def _greet(self, wire: JsonSocket, peer: str) -> None:
        """Answer a new connection: a question, or a node that joins."""
        # a port scanner, or a node that timed out and may reconnect
        with contextlib.suppress(ConnectionLost, TimeoutError):
            if self._answer(wire, peer, wire.receive(ANSWER_S)):
                return
        wire.close()

    def _answer(self, wire: JsonSocket, peer: str, message: Message) -> bool:
        """Has a node joined? Otherwise the connection is to be closed. Raises ConnectionLost."""
        node = message.get("node")
        refused = self._refusal(message, node)
        if self._begun and isinstance(node, int) and not refused:
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
                    node=node,
                    refused="; ".join(refused),
                )
            )
            wire.send({"refused": refused})
        elif message["want"] == "join" and isinstance(node, int):
            wire.send({"joined": True, "host": socket.gethostname(), "running": self._begun})
            if self._begun:
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
        elif message["want"] == "resumed":
            wire.send(self._resumed)
        else:
            wire.send({"run": self.plan["run_name"], "launch": self.plan["launch"]})
        return False

    def greet_late(self) -> None:
        """While ranks run: machines that join again. Never blocks."""
        if self.store.fileno() < 0:
            return
        for node, wire in list(self.waiting.items()):
            try:
                if any("ready" in message for message in wire.arrived()):
                    self._ready_again.add(node)
            except ConnectionLost as broken:
                log.warning(msg("launcher.nodes.lost_because", name=self.name(node), broken=broken))
                self.waiting.pop(node).close()
                self._ready_again.discard(node)
        self.store.settimeout(0)
        with contextlib.suppress(OSError):
            while True:
                connection, peer = self.store.accept()
                self._unknown.append((time.monotonic(), JsonSocket(connection), peer[0]))
        unknown, self._unknown = self._unknown, []
        for since, wire, address in unknown:
            try:
                messages = wire.arrived()
                if messages and self._answer(wire, address, messages[0]):
                    continue
                if not messages and time.monotonic() - since < ANSWER_S:
                    self._unknown.append((since, wire, address))
                    continue
            except (ConnectionLost, TimeoutError):
                pass
            wire.close()

    @property
    def members(self) -> Collection[int]:
        return self._expected

    @property
    def ready_again(self) -> tuple[int, ...]:
        """Machines that were lost and have joined again, with their data prepared."""
        return tuple(sorted(self._ready_again))

    def _refusal(self, message: Message, node: object) -> list[str]:
        if message.get("duet") != PROTOCOL:
            return [msg("launcher.nodes.protocol")]
        if not isinstance(node, int) or not 0 < node < self.place.nnodes:
            return [msg("launcher.nodes.rank_invalid", node=node, most=self.place.nnodes - 1)]
        if message.get("want") == "join":
            return (
                []
                if message.get("launch") == self.plan["launch"]
                else [msg("launcher.nodes.other_launch")]
            )
        if message.get("want") == "resumed":
            return []
        settings = message.get("facts")
        return (
            differences(settings, self._facts, node)
            if isinstance(settings, dict)
            else [msg("launcher.nodes.no_settings")]
        )

    def go(self) -> LocalRanks | None:
        waiting = Waiting()
        while missing := sorted(self._expected - self._ready):
            waiting.report(
                msg("launcher.nodes.to_be_ready", names=", ".join(map(self.name, missing))),
                level=log.info,
            )
            readable, _, _ = select.select(list(self.wires.values()), [], [], RETRY_S)
            for node in [n for n, wire in self.wires.items() if wire in readable]:
                if not (lost := self._read_ready(node)):
                    continue
                if self._elastic and self._begun:
                    self.lost_peer = lost
                    return None
                self.send_all({"left": lost.text})
                why = msg("launcher.nodes.before_start", why=lost.text)
                raise UserError(Problem("nodes.lost_before_start", why), Exit.RESOURCES)
        if self.store.fileno() < 0:  # the ranks of the last attempt used it
            self._listen()
        store = self._store_of_ranks()
        port = store.getsockname()[1]
        if is_script(self.plan) or self.plan["launcher"]["value"] == "torchrun":
            store.close()  # rank 0, or torchrun, opens the port itself
        self._fresh()
        self._begun = True
        self.send_all({"go": port})
        own = None if store.fileno() < 0 else store
        return local_ranks.of_node(self.plan, self._bound or LOOPBACK, port, own)

    def _store_of_ranks(self) -> socket.socket:
        """The socket at which the ranks meet: the same port, unless machines may join at it."""
        if not self._elastic:
            return self.store
        return local_ranks.listen(self._bound, self.port + 1, 8 * self.place.nnodes)

    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        if order is not None and self._elastic:
            self._change_machines(order)
        elif order is not None and (missing := self.missing()):
            log.error(msg("launcher.nodes.not_restarted", missing=self.names(missing)))
            order = None
        self._ready.clear()
        self.send_all({"over": stopped} if order is None else {"again": order})
        return order

    def _change_machines(self, order: Message) -> None:
        """Leave out the machines of which the order uses no rank, and admit those that are back."""
        elastic = self.plan["elastic"]
        away = {one["seat"] for one in order["team"]["lost"]}
        for node in range(1, self.place.nnodes):
            if away.issuperset(seats.on(elastic, [node])):
                self.forget(node)
            elif node in self._ready_again:
                self._ready_again.discard(node)
                self.wires[node] = self.waiting.pop(node)
        self._expected = set(self.wires)

    def dismiss(self, code: int) -> None:
        for wire in self.waiting.values():
            with contextlib.suppress(ConnectionLost):
                wire.send({"over": code})
