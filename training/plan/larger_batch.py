"""A larger total batch where GPUs would wait for their gradients, if the user allows it
(--max_total_batch_size). The amount of data stays: as many times fewer steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from training.core import standing
from training.core.contracts.plan import PlanStart
from training.core.messages import msg
from training.core.units import plural
from training.plan import exchange, gradients, tuning
from training.plan.exchange import Exchange
from training.plan.request import Request
from training.plan.tuning import Choice
from training.tasks.planning import Decided, Situation


def grow(
    request: Request, begun: PlanStart, decided: Decided, situation: Situation
) -> tuple[Decided, list[str]]:
    """(the task's decisions, sentences). A larger batch is written to the request. A run that has
    been started keeps its batch (length.keep_batch)."""
    config, total = request.config, decided.batch.total_tokens
    most = config.max_total_batch_size // total
    if not config.max_total_batch_size or standing.plan_of_start(request.resume_from):
        return decided, []
    one = gradients.predicted(begun, decided, situation.precision, situation.compiled)
    present = _choice(request, decided, one).exchange if one else None
    if one is None or present is None or present.speed_up is None:
        reason = (
            msg("plan.gradients.one_rank")
            if begun["ranks"] == 1
            else gradients.unknown(begun, situation.precision)
        )
        return decided, [msg("plan.larger_batch.unknown", total=total, reason=reason)]
    now = gradients.times(present.speed_up)
    if present.waits_little:
        return decided, [msg("plan.larger_batch.enough", total=total, speed=now)]
    enough = tuning.enough_accumulation(one, partial(_choice, request, decided), most)
    factor = enough[0] if enough else exchange.largest_factor(most)
    if not factor:
        return decided, [msg("plan.larger_batch.no_room", total=total, least=2 * total)]
    steps = int(config.num_iterations)
    larger = replace(
        request,
        config=replace(
            config,
            total_batch_size=factor * total,
            num_iterations=math.ceil(steps / factor),
        ),
        origins=request.origins | _origins(total, steps, factor),
    )
    then = request.kind.decide(larger, situation)
    if not then.fits(situation.room):
        return decided, [msg("plan.larger_batch.no_memory", total=total, larger=factor * total)]
    request.config = larger.config
    request.origins.update(larger.origins)  # the plan has the same
    other = gradients.predicted(begun, then, situation.precision, situation.compiled)
    text = msg(
        "plan.larger_batch.grown",
        larger=factor * total,
        total=total,
        speed=gradients.times(_choice(request, then, other).exchange.speed_up if other else None),
        before=now,
        ranks=begun["ranks"],
    )
    if steps:
        fewer = plural(larger.config.num_iterations, "step")
        text = msg("plan.larger_batch.fewer_steps", text=text, fewer=fewer, steps=steps)
    return then, [text]


def _origins(total: int, steps: int, factor: int) -> dict[str, str]:
    of_steps = msg("plan.larger_batch.origin_steps", steps=steps, factor=factor)
    return {
        "total_batch_size": msg("plan.larger_batch.origin", old=total, factor=factor),
        **({"num_iterations": of_steps} if steps else {}),
    }


def _choice(request: Request, decided: Decided, one: Exchange) -> Choice:
    """That of the plan for this exchange (gradients.decide). A new run has none to keep."""
    blocks = decided.step.compiled_blocks if decided.step else None
    return tuning.choose(gradients.wished(request), one, blocks)
