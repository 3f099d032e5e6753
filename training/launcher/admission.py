"""Which machines a coordinator answers: those of its run, with the same settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core.messages import msg
from training.launcher.json_socket import Message
from training.launcher.same_settings import differences

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROTOCOL = 6  # machines with another one are refused


def refusals(message: Message, plan: Plan, own: int, facts: Message) -> list[str]:
    """The reasons against a machine, which come from a network; [] if it is answered. `own`: node
    rank of this machine; `facts`: its settings."""
    node, want = message.get("node"), message.get("want")
    if message.get("duet") != PROTOCOL:
        return [msg("launcher.nodes.protocol")]
    others = [other for other in range(plan["place"]["nnodes"]) if other != own]
    if not isinstance(node, int) or node not in others:
        numbers = ", ".join(map(str, others))
        return [msg("launcher.nodes.rank_invalid", node=node, numbers=numbers)]
    if want == "join":
        same = message.get("launch") == plan["launch"]
        return [] if same else [msg("launcher.nodes.other_launch")]
    if want in ("resumed", "leader"):
        return []
    if want == "follow":  # it has lost this machine, which it cannot follow now
        return [msg("launcher.succession.superseded")]
    settings = message.get("facts")
    if not isinstance(settings, dict):
        return [msg("launcher.nodes.no_settings")]
    return differences(settings, facts, node)
