"""Node 0, before a run of its own: is it invited to one that continues without it
(training.launcher.invitation)?"""

from __future__ import annotations

import select
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from training.core.errors import UserError
from training.core.messages import msg
from training.host import network, process
from training.host.placement import Topology
from training.launcher import rendezvous
from training.launcher.invitation import CONTINUED, EVERY_S
from training.launcher.json_socket import ConnectionLost, Message
from training.launcher.listener import Listener
from training.launcher.local_ranks import listen
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

WAIT_S = 2.5 * EVERY_S
POLL_S = 0.25


def wait(plan: Plan, *, joins: bool) -> Topology | None:
    """The role of this machine in that run. Without `joins`, the wait is over as soon as another
    machine asks for the new run."""
    place = Topology(**plan["place"])
    seconds = WAIT_S if joins else min(WAIT_S, plan["config"]["rendezvous_timeout"])
    at = place.master_addr, place.master_port
    try:
        store = listen(network.own_address(at[0]), at[1], 8 * place.nnodes)
    except UserError:  # the start of the run reports it
        return None
    others = ", ".join(map(str, range(1, place.nnodes)))
    names = msg("launcher.nodes.missing", missing=others, nnodes=place.nnodes)
    shown = msg("launcher.nodes.missing_at", names=names, at=f"{at[0]}:{at[1]}")
    waiting = Waiting()
    with closing(Listener(store)) as listener, process.stoppable():
        while listener.at[1] == at[1] and waiting.seconds < seconds:
            waiting.report(shown)
            select.select([store], [], [], POLL_S)
            for wire, _, message in listener.arrived():
                with closing(wire):
                    if message.get("want") == CONTINUED:
                        return _role(message, place)
                    if message.get("want") == "leader":  # the run before may still decide
                        answer = {"launch": plan["launch"], "leader": place.node_rank}
                        with suppress(ConnectionLost):
                            wire.send(answer)
                    elif not joins:
                        return None
    return None


def _role(message: Message, place: Topology) -> Topology | None:
    """It comes from a network."""
    known = rendezvous.machines({str(message.get("leader")): message.get("at")}, place)
    for node, (address, port) in known.items():
        return replace(place, leader=node, master_addr=address, master_port=port)
    return None
