"""The network interface of node 0's ranks, for certain once other machines have connected: its own
name may be a loopback address there, as Debian writes it into /etc/hosts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.messages import msg
from training.host import env_vars, network
from training.launcher.peer_link import PeerLink

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

ENDS = "_SOCKET_IFNAME"


def correct(run: rundir.RunDir, plan: Plan, line: PeerLink) -> None:
    """On the machine that coordinates: use the interface that all others have reached, in place of
    a chosen one."""
    if not line.place.leads:
        return
    reached = {network.plain(wire.socket.getsockname()[0]) for wire in line.wires.values()}
    address = reached.pop() if len(reached) == 1 else ""
    interface = network.interface_of(address)
    for variable in plan["variables"]:
        name, before = variable["name"], variable["value"].lstrip("=")
        chosen = name.endswith(ENDS) and variable["origin"] == env_vars.HERE
        if not (interface and chosen) or before == interface:
            continue
        why = msg("launcher.nodes.reached", address=address)
        variable |= {"value": variable["value"].replace(before, interface), "why": why}
        os.environ[name] = variable["value"]
        rundir.keep_json(run.own_plan, plan)
        log.info(f"{name}={variable['value']}: {why}")
