"""Rendezvous of several machines before any rank starts; their supervisors stay connected until the
end.

Node 0 listens at the master address. Another node asks it for the run's name and submits its own
settings (`ask`), makes its part of the run directory, joins, prepares its data and reports that it
is ready; when all are, node 0 sends `go`. From then on a node reports a failed rank at once, and a
broken connection means a lost node (training.launcher.peer_link). With `--min_ranks` another one
takes over when node 0 is lost (training.launcher.succession).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.rundir import is_name
from training.host import ports
from training.host.placement import Topology
from training.launcher import stop_signals
from training.launcher.admission import PROTOCOL
from training.launcher.coordinator import (
    FIREWALL,
    RETRY_S,
)
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import ANSWER_S
from training.launcher.same_settings import facts
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def machines(sent: object, place: Topology) -> dict[int, tuple[str, int]]:
    """Where the other machines listen, as far as the message is usable: it comes from a network."""
    found = {}
    for text, at in sent.items() if isinstance(sent, dict) else ():
        node = int(text) if len(text) < 6 and text.isdecimal() else place.node_rank
        if node != place.node_rank and node < place.nnodes and isinstance(at, list):
            address, port = [*at, None, None][:2]
            if isinstance(address, str) and isinstance(port, int) and 0 < port < 65536:
                found[node] = address, port
    return found


def ask(plan: Plan, seconds: float) -> tuple[str, str, str]:
    """(run name, launch, token in a common run directory) from the machine that coordinates, which
    compares the settings of this one. Raises UserError."""
    place = Topology(**plan["place"])
    answer, wire = until_answered(
        place, {"want": "run", "node": place.node_rank, "facts": facts(plan)}, seconds
    )
    wire.close()
    name, launch, token = (answer.get(key) for key in ("run", "launch", "token"))
    if is_name(name) and is_name(launch) and is_name(token):  # they become names of files here
        return name, launch, token
    raise refused(answer, place)


def ask_resumed(place: Topology, seconds: float) -> Message:
    """The run that node 0 resumes (training.plan.sent_run). Raises UserError."""
    answer, wire = until_answered(place, {"want": "resumed", "node": place.node_rank}, seconds)
    wire.close()
    if "refused" in answer:
        raise refused(answer, place)
    return answer


def refused(answer: Message, place: Topology) -> UserError:
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


def until_answered(place: Topology, hello: Message, seconds: float) -> tuple[Message, JsonSocket]:
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
    for port in ports.following(place.master_port):
        try:
            connection = socket.create_connection((place.master_addr, port), ANSWER_S)
        except (socket.gaierror, UnicodeError) as error:
            why = (
                msg("launcher.nodes.invalid_name")  # a part of it is empty or too long
                if isinstance(error, UnicodeError)
                else error.strerror
            )
            yield msg("launcher.nodes.unknown_host", master_addr=place.master_addr, strerror=why)
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
        except KeyboardInterrupt as asked:  # node 0 may have let it join, and would wait for it
            with contextlib.suppress(ConnectionLost):
                wire.send({"asked": stop_signals.number_of(asked), "times": 1})
            wire.close()
            raise
