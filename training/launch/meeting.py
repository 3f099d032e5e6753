"""Several machines find each other before any rank starts, and their supervisors keep a line until the end.

Node 0 listens at the meeting point. Another node asks it for the run's name, with what it is going to do itself (`ask`), makes its
part of the run directory, joins, prepares its data, says that it is ready; when all are, everybody goes. From then on a node
says at once when one of its ranks has failed, and a line that breaks is a node that is gone.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from training import console
from training.errors import Exit, Problem, UserError
from training.host import network, ports
from training.launch.place import LOOPBACK, Place
from training.launch.team import Team, is_script, listen
from training.launch.wire import Broken, Message, Wire

PROTOCOL = 1
SAY_AFTER_S, SAY_EVERY_S = 5.0, 30.0
ANSWER_S = 2.0  # a stranger on the port does not answer at all
RETRY_S = 0.25
SETTLE_S = 6.0  # longer than the other ranks get for their last words (training.launch.attempt)
FIREWALL = "a firewall between the machines must let this port through"
NAME = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def facts(plan: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on every machine."""
    from training.config.schema import FIELDS, of_the_run

    own = {name: value for name, value in plan["config"].items() if name in FIELDS and of_the_run(name) and name != "run_name"}
    script = {"script": plan["script"]["args"]} if is_script(plan) else {}
    counts = {"number of machines": plan["place"]["nnodes"], "ranks per machine": plan["local_ranks"]}
    return own | script | counts | {"torch": plan["torch"]}


def differences(theirs: dict[str, Any], ours: dict[str, Any], node: int) -> list[str]:
    return [
        f"{name} is {theirs.get(name)!r} on node {node}, but {ours.get(name)!r} on node 0"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]


class Line(ABC):
    """One machine's end of the talk while the ranks run. `failed`: what another machine says of its failure, if one does."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}  # by node
        self.failed: Message | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Line:
        return self

    @abstractmethod
    def gather(self, seconds: float) -> None:
        """Meet all the others. Raises UserError after so many seconds."""

    @abstractmethod
    def go(self) -> Team:
        """When everybody is ready: the ranks of this machine. Raises UserError when a node has left."""

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
        for wire in self.wires.values():
            wire.close()

    def tell(self, message: Message) -> None:
        """To everybody; who is gone is not told."""
        for node, wire in list(self.wires.items()):
            try:
                wire.send(message)
            except Broken:
                self.lost(node)

    def settle(self, own: Message) -> Message:
        """The failure that every machine shows: of the machine where it began, as far as that can still say."""
        if own["rank"] is not None and not own["victim"]:
            self.tell({"record": own})
            return own
        end = time.monotonic() + SETTLE_S
        while self.failed is None and self.wires and time.monotonic() < end:
            for node in list(self.wires):
                for message in self.read(node):
                    self.failed = message.get("record") or self.failed
            time.sleep(RETRY_S / 5)
        if self.failed:
            self.tell({"record": self.failed})  # the other machines know only us
        return self.failed or own

    def lost(self, node: int) -> None:
        wire = self.wires.pop(node)
        wire.close()

    def read(self, node: int) -> list[Message]:
        """What this node says, with a message of ours when its line breaks in the middle."""
        wire = self.wires[node]
        messages: list[Message] = []
        try:
            messages = wire.arrived()
        except Broken as broken:
            self.lost(node)
            messages = [{"gone": str(broken)}]
        return messages


class Head(Line):
    """Node 0."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.place = plan, Place(**plan["place"])
        bound = network.own_address(self.place.master_addr)
        wanted = plan["master_port"]
        self.store = listen(bound, wanted, 8 * self.place.nnodes)
        self._stack.callback(self.store.close)
        self.address = bound or LOOPBACK
        self.port = self.store.getsockname()[1]
        if self.port != wanted:
            console.warning(f"port {wanted} is taken by {ports.owner(wanted)}; meeting at {self.port}, the others find it")

    def gather(self, seconds: float) -> None:
        started, said = time.monotonic(), 0.0
        while len(self.wires) < self.place.nnodes - 1:
            waited = time.monotonic() - started
            missing = [n for n in range(1, self.place.nnodes) if n not in self.wires]
            names = f"node {', '.join(map(str, missing))} of {self.place.nnodes}"
            at = f"{self.place.master_addr}:{self.port}"
            if waited > seconds:
                text = f"{names} did not come to {at} within {seconds:g} s (--meeting_timeout)"
                fixes = [f"on that machine: the same command with --node_rank={missing[0]} --master_addr={self.place.master_addr}"]
                raise UserError(Problem(text, "", [*fixes, FIREWALL]), Exit.RESOURCES)
            if waited - said > (SAY_EVERY_S if said else SAY_AFTER_S):
                said = waited
                console.warning(f"waiting for {names} at {at} since {waited:.0f} s")
            self.store.settimeout(RETRY_S)
            try:
                connection, peer = self.store.accept()
            except TimeoutError:
                continue
            self._greet(Wire(connection), peer[0])

    def _greet(self, wire: Wire, peer: str) -> None:
        """Answer one that comes: a question, or a node that joins."""
        try:
            message = wire.receive(ANSWER_S)
            node = message.get("node")
            refused = self._refusal(message, node)
            if refused:
                console.warning(f"refused: {peer}, which says it is node {node}: {'; '.join(refused)}")
                wire.send({"refused": refused})
            elif message["want"] == "join" and isinstance(node, int):
                if node in self.wires:
                    self.lost(node)  # it has been started again
                console.info(f"node {node} is here ({peer}, {message.get('host')})")
                self.wires[node] = wire
                wire.send({"joined": True})
                return
            else:
                wire.send({"run": self.plan["run_name"], "launch": self.plan["launch"]})
        except (Broken, TimeoutError):  # a scanner, or one that gave up: it may come again
            pass
        wire.close()

    def _refusal(self, message: Message, node: object) -> list[str]:
        if message.get("duet") != PROTOCOL:
            return ["it speaks another version of the launcher"]
        if not isinstance(node, int) or not 0 < node < self.place.nnodes:
            return [f"node_rank {node}: 1 to {self.place.nnodes - 1} are awaited here"]
        if message.get("want") == "join":
            return [] if message.get("launch") == self.plan["launch"] else ["it belongs to another start"]
        told = message.get("facts")
        return differences(told, facts(self.plan), node) if isinstance(told, dict) else ["it says nothing of its plan"]

    def go(self) -> Team:
        for node, wire in self.wires.items():
            try:
                while "ready" not in wire.receive(None):
                    pass
            except Broken as broken:
                self.tell({"gone": f"node {node}"})
                raise UserError(Problem(f"node {node} left before the start: {broken}"), Exit.RESOURCES) from broken
        local = self.plan["local_ranks"]
        if is_script(self.plan) or self.plan["launcher"]["value"] == "torchrun":
            self.store.close()  # rank 0, or torchrun, opens it itself
        self.tell({"go": self.port})
        return Team(range(local), self.plan["ranks"], self.address, self.port, None if self.store.fileno() < 0 else self.store)


class Member(Line):
    """Another node."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.place = plan, Place(**plan["place"])

    def gather(self, seconds: float) -> None:
        hello = {"want": "join", "node": self.place.node_rank, "launch": self.plan["launch"], "host": socket.gethostname()}
        answer, wire = _until_answered(self.place, hello, seconds)
        if "joined" not in answer:
            wire.close()
            raise _refused(answer, self.place)
        self.wires[0] = wire

    def go(self) -> Team:
        wire, local, first = self.wires[0], self.plan["local_ranks"], self.plan["local_ranks"] * self.place.node_rank
        try:
            wire.send({"ready": True})
            answer = wire.receive(None)
        except Broken as broken:
            raise UserError(Problem(f"node 0 left before the start: {broken}"), Exit.RESOURCES) from broken
        if "go" not in answer:
            raise UserError(Problem(f"{answer.get('gone', 'a node')} left before the start"), Exit.RESOURCES)
        return Team(range(first, first + local), self.plan["ranks"], self.place.master_addr, int(answer["go"]))


def ask(plan: dict[str, Any], seconds: float) -> tuple[str, str]:
    """(run name, launch) from node 0, which compares what this machine is going to do. Raises UserError."""
    place = Place(**plan["place"])
    answer, wire = _until_answered(place, {"want": "run", "node": place.node_rank, "facts": facts(plan)}, seconds)
    wire.close()
    name, launch = answer.get("run"), answer.get("launch")
    # The name becomes a folder here: it comes from a network.
    if isinstance(name, str) and isinstance(launch, str) and name and set(name) <= NAME and not name.startswith("."):
        return name, launch
    raise _refused(answer, place)


def _refused(answer: Message, place: Place) -> UserError:
    told = answer.get("refused")
    reasons = [str(text) for text in told] if isinstance(told, list) else ["no reason given"]
    return UserError([Problem(f"node 0 ({place.master_addr}) refuses node {place.node_rank}: {text}") for text in reasons])


def _until_answered(place: Place, hello: Message, seconds: float) -> tuple[Message, Wire]:
    """Says after some seconds why nobody answers. Raises UserError (exit 3) at the end of the time."""
    started, said = time.monotonic(), 0.0
    while True:
        why = ""
        for attempt in _attempts(place, hello):
            if isinstance(attempt, str):
                why = why or attempt
            else:
                return attempt
        waited = time.monotonic() - started
        at = f"node 0 at {place.master_addr}:{place.master_port}"
        if waited > seconds:
            fixes = ["start node 0, or give its address: --master_addr=ADDRESS", FIREWALL]
            raise UserError(Problem(f"{at} did not answer within {seconds:g} s (--meeting_timeout): {why}", "", fixes), Exit.RESOURCES)
        if waited - said > (SAY_EVERY_S if said else SAY_AFTER_S):
            said = waited
            console.warning(f"waiting for {at} since {waited:.0f} s: {why}")
        time.sleep(RETRY_S)


def _attempts(place: Place, hello: Message) -> Iterator[tuple[Message, Wire] | str]:
    """An answer, or why there is none: of the port, and of the next ones, where node 0 is when the first was taken."""
    for port in range(place.master_port, min(place.master_port + ports.TRIES, 65536)):
        try:
            connection = socket.create_connection((place.master_addr, port), ANSWER_S)
        except socket.gaierror as error:
            yield f"the name {place.master_addr!r} is not known ({error.strerror})"
            return
        except ConnectionRefusedError:
            yield "nothing listens there (connection refused)"
            continue
        except (TimeoutError, OSError) as error:
            yield f"it can not be reached ({getattr(error, 'strerror', None) or 'no answer'})"
            return
        wire = Wire(connection)
        try:
            wire.send({"duet": PROTOCOL, **hello})
            yield wire.receive(ANSWER_S), wire
            return
        except (Broken, TimeoutError):
            wire.close()
            yield "something else listens there"


def line_of(plan: dict[str, Any]) -> Head | Member:
    """This machine's end. Raises UserError when node 0 can not listen."""
    opened: Callable[[dict[str, Any]], Head | Member] = Head if plan["place"]["node_rank"] == 0 else Member
    return opened(plan)
