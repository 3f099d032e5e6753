"""The best of the evaluations in a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from training.core import metric_units
from training.core.metric_units import score_unit

if TYPE_CHECKING:
    from training.core.contracts.state import EvaluationState


def best(evaluations: Sequence[tuple[int | None, dict[str, float]]]) -> EvaluationState:
    """The metric that ranks evaluations (step, scores); a best value only if its direction is
    known."""
    names = {name: None for _, scores in evaluations for name in scores}
    if not names:
        return {
            "eval_name": None,
            "eval_unit": None,
            "eval_last": None,
            "eval_best": None,
            "eval_best_step": None,
            "eval_averaged": False,
        }
    name = min(names, key=lambda n: ("bpb" not in n, "psnr" not in n, not n.endswith("loss"), n))
    values = [(scores[name], step) for step, scores in evaluations if name in scores]
    finite = [pair for pair in values if math.isfinite(pair[0])]
    choose = _better(name)
    place = choose(finite, key=lambda pair: pair[0]) if choose and finite else (None, None)
    return {
        "eval_name": name,
        "eval_unit": score_unit(name),
        "eval_last": values[-1][0],
        "eval_best": place[0],
        "eval_best_step": place[1],
        "eval_averaged": False,
    }


def _better(name: str) -> Callable[..., Any] | None:
    """min or max; None for an unknown score, which has no best value."""
    higher = metric_units.better_if_higher(name)
    return None if higher is None else max if higher else min
