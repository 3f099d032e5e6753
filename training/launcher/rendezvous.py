"""Rendezvous of several machines before any rank starts; their supervisors stay connected until the
end.

Node 0 listens at the master address. Another node asks it for the run's name and submits its own
settings (`ask`), makes its part of the run directory, joins, prepares its data and reports that it
is ready; when all are, node 0 sends `go`. From then on a node reports a failed rank at once, and a
broken connection means a lost node (training.launcher.peer_link).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from training.config.schema import FIELDS, of_the_run
from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE
from training.core.messages import msg
from training.host import network, ports
from training.host.placement import LOOPBACK, Topology
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks, is_script, listen
from training.launcher.peer_link import NAME, PEER_DIED, LostPeer, PeerLink, Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROTOCOL = 3
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
    """Node 0."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
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
        self.store = listen(self._bound, self.port, 8 * self.place.nnodes)
        self.port = self.store.getsockname()[1]

    def _close(self) -> None:
        self.store.close()

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
                if why := self._read_ready(node):
                    log.warning(msg("launcher.nodes.may_reconnect", why=why))

    def _read_ready(self, node: int) -> str:
        """Record whether this node is ready; the reason when it is lost."""
        for message in self.read(node):
            if isinstance(message.get("gone"), LostPeer):
                self._ready.discard(node)
                return str(message["gone"].text)
            if "ready" in message:
                self._ready.add(node)
        return ""

    def _greet(self, wire: JsonSocket, peer: str) -> None:
        """Answer a new connection: a question, or a node that joins."""
        try:
            message = wire.receive(ANSWER_S)
            node = message.get("node")
            refused = self._refusal(message, node)
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
                if node in self.wires:
                    self.lost(node)  # it has been restarted
                self._ready.discard(node)
                wire.send({"joined": True, "host": socket.gethostname()})
                self.met(node, wire, peer, message.get("host"))
                log.info(msg("launcher.nodes.joined", node=node, place=self.place_of(node)))
                return
            else:
                wire.send({"run": self.plan["run_name"], "launch": self.plan["launch"]})
        # a port scanner, or a node that timed out and may reconnect
        except (ConnectionLost, TimeoutError):
            pass
        wire.close()

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
        settings = message.get("facts")
        return (
            differences(settings, facts(self.plan), node)
            if isinstance(settings, dict)
            else [msg("launcher.nodes.no_settings")]
        )

    def go(self) -> LocalRanks:
        waiting = Waiting()
        while missing := [n for n in range(1, self.place.nnodes) if n not in self._ready]:
            waiting.report(
                msg("launcher.nodes.to_be_ready", names=", ".join(map(self.name, missing))),
                level=log.info,
            )
            readable, _, _ = select.select(list(self.wires.values()), [], [], RETRY_S)
            for node in [n for n, wire in self.wires.items() if wire in readable]:
                if why := self._read_ready(node):
                    self.send_all({"left": why})
                    raise UserError(
                        Problem(
                            "nodes.lost_before_start", msg("launcher.nodes.before_start", why=why)
                        ),
                        Exit.RESOURCES,
                    )
        if self.store.fileno() < 0:  # the ranks of the last attempt used it
            self._listen()
        local = self.plan["local_ranks"]
        if is_script(self.plan) or self.plan["launcher"]["value"] == "torchrun":
            self.store.close()  # rank 0, or torchrun, opens the port itself
        self._fresh()
        self.send_all({"go": self.port})
        store = None if self.store.fileno() < 0 else self.store
        return LocalRanks(
            range(local), self.plan["ranks"], self._bound or LOOPBACK, self.port, store
        )

    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        if order is not None and (missing := self.missing()):
            log.error(msg("launcher.nodes.not_restarted", missing=missing))
            order = None
        self._ready.clear()
        self.send_all({"over": stopped} if order is None else {"again": order})
        return order


class Peer(PeerLink):
    """A node other than 0."""

    def gather(self, seconds: float) -> None:
        hello = {
            "want": "join",
            "node": self.place.node_rank,
            "launch": self.plan["launch"],
            "host": socket.gethostname(),
        }
        answer, wire = _until_answered(self.place, hello, seconds)
        if "joined" not in answer:
            wire.close()
            raise _refused(answer, self.place)
        self.met(0, wire, self.place.master_addr, answer.get("host"))

    def go(self) -> LocalRanks:
        local, first = self.plan["local_ranks"], self.plan["local_ranks"] * self.place.node_rank
        self.send_all({"ready": True})
        answer = self._await(("go", "left"), msg("launcher.nodes.to_start", name=self.name(0)))
        if "go" not in answer:
            why = answer["left"] if "left" in answer else answer["gone"].text
            raise UserError(
                Problem("nodes.lost_before_start", msg("launcher.nodes.before_start", why=why)),
                Exit.RESOURCES,
            )
        self._fresh()
        return LocalRanks(
            range(first, first + local),
            self.plan["ranks"],
            self.place.master_addr,
            int(answer["go"]),
        )

    def decide(self, order: Message | None, stopped: int = 0) -> Message | None:
        if not self.there(0):
            return None
        answer = self._await(("again", "over"), msg("launcher.nodes.decision", name=self.name(0)))
        again, over = answer.get("again"), answer.get("over")
        self.stopped = over if over in (Exit.PREEMPTED, Exit.INTERRUPTED) else 0
        return again if isinstance(again, dict) else None

    def _await(self, keys: tuple[str, ...], what: str) -> Message:
        """The next message of node 0 with one of these keys, or that it is lost. Late messages of
        the last attempt are skipped."""
        waiting = Waiting()
        while 0 in self.wires:
            waiting.report(what, level=log.info)
            select.select([self.wires[0]], [], [], RETRY_S)
            messages = self.read(0)
            for i, message in enumerate(messages):
                if isinstance(message.get("gone"), LostPeer) or any(key in message for key in keys):
                    self.keep(0, messages[i + 1 :])
                    return message
        return {"gone": LostPeer(0, GONE, PEER_DIED, msg("launcher.nodes.lost", name=self.name(0)))}


def ask(plan: Plan, seconds: float) -> tuple[str, str]:
    """(run name, launch) from node 0, which compares the settings of this machine. Raises
    UserError."""
    place = Topology(**plan["place"])
    answer, wire = _until_answered(
        place, {"want": "run", "node": place.node_rank, "facts": facts(plan)}, seconds
    )
    wire.close()
    name, launch = answer.get("run"), answer.get("launch")
    # The name becomes a folder here, and comes from a network.
    if (
        isinstance(name, str)
        and isinstance(launch, str)
        and name
        and set(name) <= NAME
        and not name.startswith(".")
    ):
        return name, launch
    raise _refused(answer, place)


def _refused(answer: Message, place: Topology) -> UserError:
    refused = answer.get("refused")
    reasons = (
        [str(text) for text in refused]
        if isinstance(refused, list)
        else [msg("launcher.nodes.no_reason")]
    )
    return UserError(
        [
            Problem(
                "nodes.refused",
                msg(
                    "launcher.nodes.refused",
                    master_addr=place.master_addr,
                    node_rank=place.node_rank,
                    text=text,
                ),
            )
            for text in reasons
        ]
    )


def _until_answered(place: Topology, hello: Message, seconds: float) -> tuple[Message, JsonSocket]:
    """Connect until node 0 answers; the reason for the delay is reported after some seconds. Raises
    UserError (exit 3) after `seconds`."""
    waiting = Waiting()
    at = msg(
        "launcher.nodes.first_at", master_addr=place.master_addr, master_port=place.master_port
    )
    while True:
        why = ""
        for attempt in _attempts(place, hello):
            if isinstance(attempt, str):
                why = why or attempt
            else:
                return attempt
        if waiting.seconds > seconds:
            fixes = [msg("launcher.nodes.start_first"), FIREWALL]
            raise UserError(
                Problem(
                    "nodes.no_answer",
                    msg("launcher.nodes.no_answer", at=at, seconds=seconds, why=why),
                    "",
                    fixes,
                ),
                Exit.RESOURCES,
            )
        waiting.report(at, why)
        time.sleep(RETRY_S)


def _attempts(place: Topology, hello: Message) -> Iterator[tuple[Message, JsonSocket] | str]:
    """An answer, or the reason for none: from the port and the next ones, one of which node 0 uses
    when the first is taken."""
    for port in range(place.master_port, min(place.master_port + ports.TRIES, 65536)):
        try:
            connection = socket.create_connection((place.master_addr, port), ANSWER_S)
        except socket.gaierror as error:
            yield msg(
                "launcher.nodes.unknown_host",
                master_addr=place.master_addr,
                strerror=error.strerror,
            )
            return
        except ConnectionRefusedError:
            yield msg("launcher.nodes.nothing_listens")
            continue
        except (TimeoutError, OSError) as error:
            yield msg(
                "launcher.nodes.cannot_reach",
                why=getattr(error, "strerror", None) or msg("launcher.nodes.answers_not"),
            )
            return
        wire = JsonSocket(connection)
        try:
            wire.send({"duet": PROTOCOL, **hello})
            yield wire.receive(ANSWER_S), wire
            return
        except (ConnectionLost, TimeoutError):
            wire.close()
            yield msg("launcher.nodes.other_program")


def line_of(plan: Plan) -> Coordinator | Peer:
    """The end of this machine. Raises UserError when node 0 cannot listen."""
    opened: Callable[[Plan], Coordinator | Peer] = (
        Coordinator if plan["place"]["node_rank"] == 0 else Peer
    )
    return opened(plan)
