"""Sentences of a plan that depend on its micro-batch, from the decisions in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training import tasks
from training.config.batch import Batch
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def split(plan: Plan) -> str:
    sentence = Batch(**plan["batch"]).sentence(tasks.task_of(plan)["unit"])
    return msg("plan.text.batch", sentence=sentence)


def size(plan: Plan) -> str:
    chosen = plan["device_batch_size"]
    return msg("plan.text.device_batch_size", size=chosen["value"], reason=chosen["reason"])


def after(plan: Plan, changed: Plan) -> tuple[list[str], list[str]]:
    """(text, notes) of the plan with another micro-batch."""
    spec = tasks.spec_of(plan)
    old, new = ([split(one), *spec.memory_text(one)] for one in (plan, changed))
    if "device_batch_size" in plan:
        old, new = [*old, size(plan)], [*new, size(changed)]
    instead = dict(zip(old, new, strict=True))
    text = [instead.get(line, line) for line in plan["text"]]
    text += [] if size(changed) in text else [size(changed)]
    past = spec.memory_notes(plan)
    return text, [note for note in plan["notes"] if note not in past]
