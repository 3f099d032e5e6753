"""`--min_ranks`: whether a run may continue with fewer ranks, and the record for its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.config import origin
from training.config.schema import Config
from training.core.errors import Problem
from training.core.messages import msg
from training.core.units import plural
from training.host.placement import RANK, Topology

if TYPE_CHECKING:
    from training.core.contracts.plan import ElasticRecord, Plan


def problems(
    config: Config, origins: Mapping[str, str], ranks: int, place: Topology, *, watch: bool = False
) -> list[Problem]:
    """A --min_ranks that cannot work. One that a resumed run brings along is ignored instead.
    `watch`: a watched command starts the ranks."""
    least = config.min_ranks
    if not isinstance(least, int) or not origin.asked_for(origins["min_ranks"]):
        return []
    given = msg("plan.elastic.given", least=least, origin=origins["min_ranks"])
    if least > ranks:
        return [
            Problem(
                "elastic.too_many",
                msg("plan.elastic.too_many", given=given, ranks=plural(ranks, "rank")),
                msg("plan.elastic.range", ranks=ranks),
                ["--min_ranks=1"],
                "min_ranks",
            )
        ]
    if watch or place.kind == RANK or config.launcher == "torchrun":
        return [
            Problem(
                "elastic.place",
                msg("plan.elastic.place", given=given),
                msg("plan.elastic.own_ranks"),
                [msg("plan.elastic.omit")],
                "min_ranks",
            )
        ]
    if config.retries == 0:
        return [
            Problem(
                "elastic.retries",
                msg("plan.elastic.retries", given=given, origin=origins["retries"]),
                msg("plan.elastic.some_retries"),
                ["--retries=2"],
                "min_ranks",
            )
        ]
    return []


def record(plan: Plan) -> ElasticRecord | None:
    """None: the run needs all of its ranks."""
    least = plan["config"]["min_ranks"]
    place = plan["place"]
    usable = place["kind"] != RANK and plan["launcher"]["value"] == "spawn"
    if not isinstance(least, int) or least >= plan["ranks"] or not usable:
        return None
    if not plan["retries"]["value"]:
        return None
    size = plan["batch"]["device_sequences"] if "batch" in plan else None
    made: ElasticRecord = {
        "min_ranks": least,
        "ranks": plan["ranks"],
        "device_batch_size": size,
        "gpus": plan["gpus"],
        "bindings": plan["numa"]["value"] if "numa" in plan else [],
        "seats": list(range(plan["ranks"])),
        "lost": [],
        "rejoined": [],
    }
    return made | {"per_node": plan["local_ranks"]} if place["nnodes"] > 1 else made


def note(plan: Plan) -> list[str]:
    """A config file or a resumed run has asked for what this start cannot do."""
    least = plan["config"]["min_ranks"]
    if not isinstance(least, int) or "elastic" in plan or least >= plan["ranks"]:
        return []
    return [msg("plan.elastic.no_effect", least=least)]


def sentence(plan: Plan) -> list[str]:
    if "elastic" not in plan:
        return []
    return [msg("plan.elastic.text", least=plan["elastic"]["min_ranks"], ranks=plan["ranks"])]
