"""Node 0 of several machines: it listens at the master address, greets the others, starts all of
them together, and lets a lost one join again (`--min_ranks`)."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE
from training.core.messages import msg
from training.host import network, ports
from training.host.gpus import one_line
from training.host.placement import LOOPBACK
from training.launcher import local_ranks, seats, stop_signals
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.peer_link import (
    LATE_S,
    PEER_DIED,
    LostPeer,
    PeerLink,
    Stopped,
    Waiting,
    stop_request,
)
from training.launcher.same_settings import differences, facts
from training.plan import sent_run

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROTOCOL = 4
ANSWER_S = 2.0  # another program on the port does not answer at all
RETRY_S = 0.25
SHOWN = 1000  # characters of what an unknown program has sent
UNKNOWN = 64  # connections that have sent nothing yet; the kernel keeps further ones waiting
FIREWALL = msg("launcher.nodes.firewall")


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
            # none, or one that was closed at once
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection, peer = self.store.accept()
                self._greet(JsonSocket(connection), peer[0])
            for node in list(self.wires):
                lost = self._read_ready(node)
                if self.asked:
                    raise Stopped(self.asked, self._asked_node)
                if lost:
                    log.warning(msg("launcher.nodes.may_reconnect", why=lost.text))

    def _read_ready(self, node: int) -> LostPeer | None:
        """Record whether this node is ready; the loss if it is lost."""
        for message in self.read(node):
            if isinstance(lost := message.get("gone"), LostPeer):
                self._ready.discard(node)
                return lost
            if "ready" in message:
                self._ready.add(node)
            if not self.asked and (number := stop_request(message)):
                self.asked, self._asked_node = number, node
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
                    node=one_line(str(node))[:SHOWN],
                    refused=one_line("; ".join(refused))[:SHOWN],
                )
            )
            wire.send({"refused": refused})
        elif message.get("want") == "join" and isinstance(node, int):
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
        elif message.get("want") == "resumed":
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
            while len(self._unknown) < UNKNOWN:
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
        if self._begun and (gone := sorted(self._expected - self.wires.keys())):
            text = msg("launcher.nodes.lost", name=self.names(gone))
            self.lost_peer = LostPeer(gone[0], GONE, PEER_DIED, text)
            return None
        while missing := sorted(self._expected - self._ready):
            if self.asked:
                raise Stopped(self.asked, self._asked_node)
            waiting.report(
                msg("launcher.nodes.to_be_ready", names=", ".join(map(self.name, missing))),
                level=log.info,
            )
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
        if self.asked:
            raise Stopped(self.asked, self._asked_node)
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
        """Leave out the machines of which all ranks are lost, and admit those that are back. One
        that is neither connected nor back has been lost since the decision: `go()` reports it."""
        elastic = self.plan["elastic"]
        away = {one["seat"] for one in order["team"]["lost"]}
        for node in range(1, self.place.nnodes):
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
            over |= {"asked": number, "node": self._asked_node or 0}
        self.send_all(over)

    def dismiss(self, code: int) -> None:
        for wire in self.waiting.values():
            with contextlib.suppress(ConnectionLost):
                wire.send({"over": code})
