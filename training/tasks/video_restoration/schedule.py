"""Learning-rate schedule: a function of the step alone, so there is no state to resume."""

from __future__ import annotations

import math
from typing import Any

from training.tasks.video_restoration import lists


def share(options: Any, step: int, total: int) -> float:
    """Share of the peak learning rate in step `step` (0-based) of `total`."""
    if options.G_scheduler_type == "CosineAnnealingWarmRestarts":
        return _cosine(options, step, total)
    if options.G_scheduler_type == "MultiStepLR":
        return float(
            options.G_scheduler_gamma
            ** sum(m <= step for m in lists.whole(options.G_scheduler_milestones))
        )
    return 1.0


def _cosine(options: Any, step: int, total: int) -> float:
    """Consecutive periods; the last one repeats, as in torch's scheduler."""
    periods = lists.whole(options.G_scheduler_periods) or [max(1, total)]
    weights = lists.numbers(options.G_scheduler_restart_weights)
    number = 0
    while step >= periods[number]:
        step -= periods[number]
        if number + 1 < len(periods):
            number += 1
        else:
            step %= periods[number]
    weight = weights[min(number, len(weights) - 1)]
    least = options.G_scheduler_eta_min / options.G_optimizer_lr if options.G_optimizer_lr else 0.0
    return least + weight * (1 - least) * 0.5 * (1 + math.cos(math.pi * step / periods[number]))
