"""Planned ranks (seats) and their machines: a run with `--min_ranks` may use some of them only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.core.contracts.plan import ElasticRecord, Plan


def per_node(elastic: ElasticRecord) -> int:
    """Planned ranks of each machine."""
    return elastic.get("per_node", elastic["ranks"])


def node_of(elastic: ElasticRecord, seat: int) -> int:
    return seat // per_node(elastic)


def leader(plan: Plan) -> int:
    """The machine that coordinates the run."""
    return plan["place"].get("leader", 0)


def in_order(plan: Plan) -> list[int]:
    """All planned numbers in the order of their ranks: first those of the machine that coordinates
    the run, because rank 0 writes it."""
    elastic, first = plan["elastic"], leader(plan)
    return sorted(range(elastic["ranks"]), key=lambda seat: (node_of(elastic, seat) != first, seat))


def on(elastic: ElasticRecord, nodes: Collection[int]) -> list[int]:
    """The seats of these machines."""
    return [seat for seat in range(elastic["ranks"]) if node_of(elastic, seat) in nodes]


def here(plan: Plan) -> range:
    """The seats of this machine."""
    count = per_node(plan["elastic"])
    first = count * plan["place"]["node_rank"] if "per_node" in plan["elastic"] else 0
    return range(first, first + count)


def ranks(plan: Plan) -> range:
    """The present ranks of this machine; empty on a machine that waits for the next loss."""
    if "elastic" not in plan:
        first = plan["local_ranks"] * plan["place"]["node_rank"]
        return range(first, first + plan["local_ranks"])
    own, used = here(plan), plan["elastic"]["seats"]
    found = [rank for rank, seat in enumerate(used) if seat in own]
    return range(found[0], found[-1] + 1) if found else range(0)


def nodes(plan: Plan) -> list[int]:
    """The machines that have ranks at present, in the order of these."""
    if "elastic" not in plan:
        return list(range(plan["place"]["nnodes"]))
    elastic = plan["elastic"]
    return list(dict.fromkeys(node_of(elastic, seat) for seat in elastic["seats"]))


def machine_of(plan: Plan, rank: int | None) -> int:
    """The machine of a present rank; this one without a rank."""
    if rank is None:
        return plan["place"]["node_rank"]
    if "elastic" not in plan:
        return rank // plan["local_ranks"]
    return node_of(plan["elastic"], plan["elastic"]["seats"][rank])


def place_of_gpu(plan: Plan, rank: int) -> int | None:
    """The position in the plan of the GPU of this rank; None if it is not on this machine."""
    if not plan["gpus"] or rank not in (own := ranks(plan)):
        return None
    # each rank of another launcher may see its own GPU alone
    return 0 if len(plan["gpus"]) == 1 else own.index(rank)
