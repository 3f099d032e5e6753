"""Rendezvous of several machines before any rank starts; their supervisors stay connected until the
end.

Node 0 listens at the master address. Another node asks it for the run's name and submits its own
settings (`ask`), makes its part of the run directory, joins, prepares its data and reports that it
is ready; when all are, node 0 sends `go`. From then on a node reports a failed rank at once, and a
broken connection means a lost node (training.launcher.peer_link).
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.failure_kinds import GONE
from training.core.messages import msg
from training.core.rundir import is_name
from training.host import ports
from training.host.gpus import one_line
from training.host.placement import Topology
from training.launcher.coordinator import (
    ANSWER_S,
    FIREWALL,
    PROTOCOL,
    RETRY_S,
    Coordinator,
)
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.local_ranks import LocalRanks, is_script, of_node
from training.launcher.peer_link import (
    PEER_DIED,
    LostPeer,
    PeerLink,
    RunEnded,
    Stopped,
    Waiting,
    stop_request,
)
from training.launcher.same_settings import facts

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


class Peer(PeerLink):
    """A node other than 0."""

    def gather(self, seconds: float) -> None:
        hello = {
            "want": "join",
            "node": self.place.node_rank,
            "launch": self.plan["launch"],
            "host": socket.gethostname(),
            "shared": self.plan.get("shared", True),
        }
        answer, wire = _until_answered(self.place, hello, seconds)
        if "joined" not in answer:
            wire.close()
            raise _refused(answer, self.place)
        self.met(0, wire, self.place.master_addr, answer.get("host"))
        if answer.get("running"):
            log.info(
                msg("launcher.nodes.joins_script", name=self.name(0))
                if is_script(self.plan)
                else msg("launcher.nodes.joins_later", name=self.name(0))
            )

    def go(self) -> LocalRanks | None:
        self.send_all({"ready": True})
        keys = ("go", "left", "again", "over")
        answer = self._await(keys, msg("launcher.nodes.to_start", name=self.name(0)))
        if "again" in answer:
            self.keep(0, [answer])
            return None
        if isinstance(code := answer.get("over"), int):
            if number := stop_request(answer):  # before the start
                raise Stopped(number, int(answer["node"]))
            raise RunEnded(code)
        if "go" not in answer:
            why = answer["left"] if "left" in answer else answer["gone"].text
            raise UserError(
                Problem("nodes.lost_before_start", msg("launcher.nodes.before_start", why=why)),
                Exit.RESOURCES,
            )
        self._fresh()
        return of_node(self.plan, self.place.master_addr, int(answer["go"]))

    def stop(self, number: int) -> None:
        self.send_all({"asked": number, "times": 1})

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
    if is_name(name) and is_name(launch):  # they become names of files here
        return name, launch
    raise _refused(answer, place)


def ask_resumed(place: Topology, seconds: float) -> Message:
    """The run that node 0 resumes (training.plan.sent_run). Raises UserError."""
    answer, wire = _until_answered(place, {"want": "resumed", "node": place.node_rank}, seconds)
    wire.close()
    if "refused" in answer:
        raise _refused(answer, place)
    return answer


def _refused(answer: Message, place: Topology) -> UserError:
    refused = answer.get("refused")
    reasons = (
        [one_line(str(text)) for text in refused]
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
