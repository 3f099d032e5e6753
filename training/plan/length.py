"""`--tokens_per_param` and `--num_iterations=auto`: steps from the size of the model."""

from __future__ import annotations

import math

from training import tasks
from training.config.origin import asked_for
from training.config.resolve import Resolved
from training.config.schema import AUTO
from training.core.errors import Problem
from training.core.messages import msg

# Compute-optimal for a transformer on text: Hoffmann et al., arXiv:2203.15556.
TOKENS_PER_PARAM = 20.0


def settle(resolved: Resolved) -> None:
    """Replace num_iterations by the steps that follow from the model; with problems."""
    config, origins = resolved.config, resolved.origins
    auto = str(config.num_iterations) in AUTO
    share = config.tokens_per_param or (TOKENS_PER_PARAM if auto else 0.0)
    if not share:
        return
    if not auto and asked_for(origins["num_iterations"]):
        if asked_for(origins["tokens_per_param"]):
            what = msg("plan.length.both", share=share, steps=config.num_iterations)
            resolved.problems.append(
                Problem("config.two_lengths", what, msg("plan.length.one_of"), [], "num_iterations")
            )
        config.tokens_per_param = 0.0  # of the config file or the resumed run
        return
    kind, wrong = tasks.find(config.task, origins["task"])
    parameters = None if wrong else kind.parameters(config)
    if parameters is None:
        config.num_iterations = 0
        if not wrong:
            what = msg("plan.length.no_parameters", task=config.task)
            allowed = msg("plan.length.a_number")
            resolved.problems.append(
                Problem("config.no_parameters", what, allowed, [], "num_iterations")
            )
        return
    config.num_iterations = max(1, math.ceil(share * parameters / config.total_batch_size))
    if not auto:
        origins["num_iterations"] = origins["tokens_per_param"]
