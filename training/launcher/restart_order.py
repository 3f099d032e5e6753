"""The order to restart that the coordinating machine sends to the others, and its effect there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.launcher import replan
from training.launcher.json_socket import Message
from training.launcher.recovery_policy import CURES
from training.launcher.restart import Restart

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def made(plan: Plan, chosen: Restart, attempt: int) -> Message:
    """`plan`: of the last attempt; `attempt`: the next one. With `--min_ranks` the order has
    everything that a machine needs which joins with its own plan."""
    if "elastic" not in plan:
        return {"changes": chosen.changes, "why": chosen.why}
    plan = replan.after(plan, chosen)
    config, elastic = plan["config"], plan["elastic"]
    return {
        "changes": {name: config[name] for name in CURES if name in config},
        "why": chosen.why,
        "attempt": attempt,
        "team": {
            name: elastic.get(name)
            for name in ("seats", "lost", "rejoined", "defective", "device_batch_size")
        }
        | {"keeps_savings": plan.get("keeps_savings", False)},
    }


def followed(plan: Plan, order: Message) -> Plan:
    """The plan of another machine for the next attempt; the same object without any change. The
    order comes from a network: only fields that may change are changed."""
    why = str(order["why"])
    changes = {
        name: value
        for name, value in order["changes"].items()
        if name in CURES and value != plan["config"].get(name)
    }
    if team := order.get("team"):
        changes.pop("device_batch_size", None)
        size = order["changes"]["device_batch_size"] if "batch" in plan else None
        lists = (team["seats"], team["lost"], team["rejoined"], team.get("defective") or [])
        plan = replan.with_seats(plan, *lists, size, why)
        # for this machine's own decisions, if it takes over
        limit = team.get("device_batch_size", plan["elastic"]["device_batch_size"])
        plan |= {"elastic": {**plan["elastic"], "device_batch_size": limit}}
        if team.get("keeps_savings") is True:
            plan |= {"keeps_savings": True}
    return replan.changed_plan(plan, changes, why) if changes else plan
