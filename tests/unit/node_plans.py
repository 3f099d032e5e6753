"""Plans of the nodes of a run, as far as their supervisors need them."""

from __future__ import annotations

from typing import Any

from training.host.placement import NODE, Topology

LOOPBACK = "127.0.0.1"


def plan(node: int, port: int, nodes: int = 2, **config: Any) -> Any:
    place = Topology(
        NODE, "flags", "", nnodes=nodes, node_rank=node, master_addr=LOOPBACK, master_port=port
    )
    return {
        "place": place.record(),
        "config": {
            **{"seed": 1, "depth": 2, "master_port": port, "node_rank": node, "run_name": ""},
            **{"hosts": "", "hostfile": "", "rendezvous_timeout": 60},
        }
        | config,
        "ranks": 2 * nodes,
        "local_ranks": 2,
        "launcher": {"value": "spawn"},
        "master_port": port,
        "torch": "2.13.0",
        "duet_version": "0.1.0",
        "run_name": "a_run",
        "launch": "abc",
        "resume": False,
    }
