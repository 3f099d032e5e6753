"""Settings of a run, in which the table of runs and the comparison page find differences."""

from __future__ import annotations

from collections.abc import Sequence

from training.core.jsonl import Record, dig, items
from training.monitor.run_status import script_of

SCRIPT, ARGS = "script", "args"  # of a user script: its path and its arguments


def fields(plan: Record) -> Record:
    """The configuration with the options of the task."""
    parts = (plan.get("config"), dig(plan, "task", "options"))
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def settings(plan: Record) -> Record:
    """`fields`, with the path and the redacted arguments of a user script."""
    found = fields(plan)
    if (script := script_of(plan)) is not None:
        from training.core import redact

        words = items(dig(plan, "script", "args"))
        found[SCRIPT] = script
        found[ARGS] = redact.joined(word for word in words if isinstance(word, str))
    return found


def differ(name: str, runs: Sequence[Record]) -> bool:
    """Whether the runs that have this setting have several values of it. Only the task also differs
    from a missing one: a user script has none."""
    values = [one.get(name) for one in runs if name in one or name == "task"]
    return any(value != values[0] for value in values)
