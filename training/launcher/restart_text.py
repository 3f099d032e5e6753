"""Restarts in words: the message after a failure, and the line at the end of the run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from training.core import units
from training.core.messages import msg
from training.diagnose import gpu_occupants
from training.launcher.restart import BY_ITSELF, Failure, Restart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from training.core.contracts.verdict import FailureRecord

SHOWN = 3  # failures in the last line


def restart(failure: Failure, chosen: Restart, retries: int) -> str:
    """What a restart of Duet's own training repeats and changes."""
    origin = (
        msg("launcher.restart.from_step", step=failure.saved)
        if failure.saved
        else msg("launcher.restart.from_beginning")
    )
    return msg(
        "launcher.restart.text",
        origin=origin,
        count=count(chosen, retries),
        pause=pause(chosen),
        steps=units.plural(failure.lost, "step"),
        changes=changes(chosen),
    )


def count(chosen: Restart, retries: int) -> str:
    if not chosen.number:
        return ""
    return msg("launcher.restart.count", number=chosen.number, retries=retries)


def pause(chosen: Restart) -> str:
    return msg("launcher.restart.pause", pause_s=chosen.pause_s) if chosen.pause_s else ""


def changes(chosen: Restart) -> str:
    return msg("launcher.restart.changes", label=chosen.label) if chosen.label else ""


def after(reasons: Sequence[str]) -> str:
    """' after 2 restarts (…)'. `reasons`: of all restarts."""
    kinds = Counter(reasons)
    shown = [
        msg("launcher.restart.times", text=text, times=times) if times > 1 else text
        for text, times in kinds.items()
    ]
    counted, listed = units.plural(len(reasons), "restart"), "; ".join(shown[-SHOWN:])
    return (
        msg("launcher.restart.after_last", restarts=counted, failures=listed)
        if len(kinds) > SHOWN
        else msg("launcher.restart.after", restarts=counted, failures=listed)
    )


def headline(record: FailureRecord) -> str:
    """A failure in one line: rank, phase, cause, place."""
    cause = "" if record["cause"] in BY_ITSELF else f"{record['cause']}: "
    where = msg("launcher.failure.at", where=record["where"]) if record["where"] else ""
    what = f"{cause}{record['summary']}{where}"
    if "occupied" in record:
        what += f"; {gpu_occupants.text(record['occupied'])}"
    if file := record.get("memory", {}).get("file"):
        what += f"; {msg('diagnose.card.memory_file', file=file)}"
    if record["rank"] is None:
        return what
    node = msg("launcher.failure.on_node", node=record["node"]) if "node" in record else ""
    phase = msg("launcher.failure.in_phase", phase=record["phase"]) if record["phase"] else ""
    return msg("launcher.failure.headline", rank=record["rank"], node=node, phase=phase, what=what)
