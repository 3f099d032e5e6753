"""The block of `--check` for a bug report: short, without user names, host names, home folders and
keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from training.core import redact, units
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.plan.preflight import versions
from training.plan.preflight.report import OK, Check, count

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

NOTES, VALUE = 6, 60  # most notes; most characters of a value


def block(
    plan: Plan, checks: Sequence[Check], found: Mapping[str, str | None], verdict: str
) -> str:
    """Fenced Markdown. `verdict`: on the memory of a step; '' if a check has it."""
    clean = redact.Anonymous(logins=redact.machines_of(plan))
    word = memory_word(plan["device"]["value"] == "cuda")
    decided = [
        f"{name} {_word(plan[name]['value'])}"
        for name in ("launcher", "device", "precision", "compile")
        if name in plan
    ]
    cards = [
        f"{gpu['name']} ({gpu['total_bytes'] >> 20} MiB)" if gpu["total_bytes"] else gpu["name"]
        for gpu in plan["gpus"]
    ]
    chosen = [
        f"{v['name']}={redact.shown(v['name'], v['value'])[:VALUE]}"
        for v in plan["variables"]
        if v["origin"] != "set here"
    ]
    lines = [
        versions.sentence(found),
        msg(
            "plan.bug_report.command",
            command=clean.command(plan["command"]["script"], plan["command"]["args"]),
        ),
        msg("plan.word.comma").join([units.plural(plan["ranks"], "rank"), *decided])
        + (msg("plan.bug_report.gpus", cards=", ".join(cards)) if cards else ""),
        *([msg("plan.bug_report.memory", memory=word, verdict=verdict)] if verdict else []),
        *([msg("plan.bug_report.variables", variables=" ".join(chosen))] if chosen else []),
        count(list(checks)),
        *(f"{c.status}: {c.name}: {c.text}" for c in checks if c.status != OK),
        *(
            msg("plan.dry_run.note", note=n)
            for n in [n for n in plan["notes"] if n not in {c.line for c in checks}][:NOTES]
        ),
    ]
    # Backticks in the text would end the fence.
    return "\n".join(["```text", *(clean(line).replace("```", "'''") for line in lines), "```"])


def _word(value: object) -> object:
    return (
        {True: msg("plan.word.on"), False: msg("plan.word.off")}.get(value, value)
        if isinstance(value, bool)
        else value
    )
