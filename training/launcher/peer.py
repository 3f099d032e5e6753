"""A machine that does not coordinate the run."""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.core import cause_ids, log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE, SILENT
from training.core.messages import msg
from training.core.plain_text import one_line
from training.launcher import rendezvous
from training.launcher.admission import PROTOCOL
from training.launcher.coordinator import RETRY_S
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import Listener
from training.launcher.local_ranks import LocalRanks, is_script, listen, of_node
from training.launcher.peer_link import (
    LostPeer,
    PeerLink,
    RunEnded,
    Stopped,
    stop_request,
)
from training.launcher.reach import Reach
from training.launcher.reception import SHOWN
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


@dataclass(frozen=True)
class Asker:
    """A machine that follows this one if it takes over. `hello`: its message."""

    wire: JsonSocket
    address: str
    hello: Message


class Peer(PeerLink):
    """With `--min_ranks` it listens too: the others ask there once the machine that coordinates is
    lost."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.listener: Listener | None = None
        self._machines: dict[int, tuple[str, int]] = {}
        # other machines that have lost the one that coordinates, by node
        self.followers: dict[int, Asker] = {}
        self.awaited: JsonSocket | None = None  # to a machine that takes over if it can
        self.over = False  # the run has ended
        self._begun = False
        self._apart = Reach()  # machines because of which this one was left out
        self._stack.callback(self._apart.close)
        self._stack.callback(self._close)

    def _close(self) -> None:
        if self.listener:
            self.listener.close()
        if self.awaited:
            self.awaited.close()
        self.dismiss_followers()

    def dismiss_followers(self) -> None:
        """This machine does not take over: the next one may."""
        for asker in self.followers.values():
            asker.wire.close()
        self.followers.clear()

    @property
    def leader(self) -> int:
        return self.place.leader

    @property
    def machines(self) -> dict[int, tuple[str, int]]:
        return self._machines | {self.leader: self._at()}

    @property
    def lost_leader(self) -> LostPeer | None:
        """The machine that coordinates, if it is lost and another one may take over."""
        leader = self.leader
        if self.over or not (self._begun and self.listener) or self.there(leader):
            return None
        text = msg("launcher.nodes.lost", name=self.name(leader))
        return self.lost_peer or LostPeer(leader, GONE, cause_ids.PEER_DIED, text)

    @property
    def members(self) -> Collection[int]:
        return (self.leader,)

    def gather(self, seconds: float) -> None:
        hello = {
            "want": "join",
            "node": self.place.node_rank,
            "launch": self.plan["launch"],
            "host": socket.gethostname(),
            "shared": self.plan.get("shared", True),
        }
        answer, wire = rendezvous.until_answered(self.place, hello, seconds)
        if "joined" not in answer:
            wire.close()
            raise rendezvous.refused(answer, self.place)
        # node 0 listens at one of the next ports when the first is taken
        self.place = replace(self.place, master_port=wire.socket.getpeername()[1])
        self.met(self.leader, wire, self.place.master_addr, answer.get("host"))
        self.secret = str(answer.get("secret") or "")
        if "elastic" in self.plan:
            self.listener = Listener(listen(wire.socket.getsockname()[0], 0, 8 * self.place.nnodes))
        if answer.get("running"):
            log.info(
                msg("launcher.nodes.joins_script", name=self.name(self.leader))
                if is_script(self.plan)
                else msg("launcher.nodes.joins_later", name=self.name(self.leader))
            )
        if apart := rendezvous.machines(answer.get("apart"), self.place):
            self._apart.begin_again(apart)
            log.warning(msg("launcher.reach.was_cut", names=", ".join(map(str, apart))))

    def follow(self, node: int, wire: JsonSocket, address: str, answer: Message) -> None:
        """Another machine coordinates the run from now on. Raises ConnectionLost if its answer is
        unusable: it comes from a network."""
        port = answer.get("port")
        if not isinstance(port, int):
            raise ConnectionLost(msg("launcher.socket.protocol"))
        place = replace(self.place, leader=node, master_addr=address, master_port=port)
        self.plan["place"], self.place = place.record(), place
        self.lost_peer = None
        for known in (self._kept, self._silent, self._warned):
            known.clear()
        self.met(node, wire, address, answer.get("host"))

    def greet(self) -> None:
        """Answer machines that ask. Never blocks."""
        for known, asker in list(self.followers.items()):
            try:
                for message in asker.wire.arrived():
                    if not self.there(self.leader):  # else that machine alone has lost it
                        self.note_stop(known, message)
            except ConnectionLost:  # it waits no longer
                self.followers.pop(known).wire.close()
        for wire, address, message in self.listener.arrived() if self.listener else ():
            node = message.get("node")
            if message.get("want") == "follow" and isinstance(node, int) and self._ours(message):
                if before := self.followers.pop(node, None):
                    before.wire.close()
                self.followers[node] = Asker(wire, address, message)
                continue
            with contextlib.suppress(ConnectionLost):  # a machine that has been started again
                wire.send({"launch": self.plan["launch"], "leader": self.leader, "at": self._at()})
            wire.close()

    def _ours(self, message: Message) -> bool:
        return message.get("duet") == PROTOCOL and message.get("launch") == self.plan["launch"]

    def _at(self) -> tuple[str, int]:
        """Where the machine listens that coordinates the run."""
        return self.place.master_addr, self.place.master_port

    def go(self) -> LocalRanks | None:
        own = self.place.node_rank
        ready: Message = {"ready": True, "replica": self.replica_ports.get(own)}
        self.send_all(ready | {"listener": self.listener.at[1]} if self.listener else ready)
        keys = ("go", "left", "again", "over")
        answer = self._await(keys, msg("launcher.nodes.to_start", name=self.name(self.leader)))
        if "again" in answer:
            self.keep(self.leader, [answer])
            return None
        if isinstance(code := answer.get("over"), int):
            self.over = True
            if number := stop_request(answer):  # before the start
                raise Stopped(number, int(answer["node"]))
            raise RunEnded(code)
        if "go" not in answer:
            if self.lost_leader:
                return None
            why = answer["left"] if "left" in answer else answer["gone"].text
            raise UserError(
                Problem("nodes.lost_before_start", msg("launcher.nodes.before_start", why=why)),
                Exit.RESOURCES,
            )
        self._fresh()
        self._begun = True
        self._apart.begin({})
        self._machines = rendezvous.machines(answer.get("machines"), self.place)
        for node, (address, _) in self._machines.items():
            self._places[node] = self.shown(address, None)
        return of_node(self.plan, self.place.master_addr, int(answer["go"]))

    def stop(self, number: int) -> None:
        asked = {"asked": number, "times": 1}
        self.send_all(asked)
        # while the machines decide which of them takes over, they are connected to that one
        for wire in (self.awaited, *(asker.wire for asker in self.followers.values())):
            with contextlib.suppress(ConnectionLost):
                if wire:
                    wire.send(asked)

    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        if not self.there(self.leader):
            return None
        what = msg("launcher.nodes.decision", name=self.name(self.leader))
        # one whose processes are stopped, or wait for a disk, keeps its connection
        limit_s = self.between_starts_s() if self.listener else math.inf
        answer = self._await(("again", "over"), what, limit_s)
        again, over = answer.get("again"), answer.get("over")
        self.over = "over" in answer
        self.stopped = over if over in (Exit.PREEMPTED, Exit.INTERRUPTED) else 0
        return again if isinstance(again, dict) else None

    def _await(self, keys: tuple[str, ...], what: str, limit_s: float = math.inf) -> Message:
        """The next message of the machine that coordinates with one of these keys, or that it is
        lost. Late messages of the last attempt are skipped."""
        waiting, leader, heard_s, why = Waiting(), self.leader, 0.0, ""
        while leader in self.wires:
            if waiting.seconds - heard_s > limit_s:
                self.lost(leader)
                text = msg("launcher.nodes.undecided", name=self.name(leader), seconds=limit_s)
                self.lost_peer = LostPeer(leader, SILENT, cause_ids.PEER_DIED, text)
                return {"gone": self.lost_peer}
            waiting.report(what, why, level=log.info)
            self.ping()
            select.select([self.wires[leader]], [], [], RETRY_S)
            self.greet()
            if self._apart.look():
                self.send_all({"cut": sorted(self._apart.lost)})
            messages = self.read(leader)
            for i, message in enumerate(messages):
                if isinstance(lost := message.get("gone"), LostPeer):
                    self.lost_peer = lost
                elif "undecided" in message:  # it waits for another machine itself
                    heard_s, why = waiting.seconds, one_line(str(message["undecided"]))[:SHOWN]
                    continue
                elif not any(key in message for key in keys):
                    continue
                self.keep(leader, messages[i + 1 :])
                return message
        text = msg("launcher.nodes.lost", name=self.name(leader))
        self.lost_peer = LostPeer(leader, GONE, cause_ids.PEER_DIED, text)
        return {"gone": self.lost_peer}
