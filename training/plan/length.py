"""`--tokens_per_param` and `--num_iterations=auto`: steps from the size of the model. Batch and
steps of a resumed run whose batch was grown."""

from __future__ import annotations

import math

from training import tasks
from training.config.loader import Values
from training.config.origin import Origin, asked_for
from training.config.resolve import Resolved
from training.config.schema import AUTO, Config
from training.core import manifest
from training.core.errors import Problem
from training.core.messages import msg
from training.core.rundir import RunDir

# Compute-optimal for a transformer on text: Hoffmann et al., arXiv:2203.15556.
TOKENS_PER_PARAM = 20.0


def settle(resolved: Resolved, resumed: RunDir | None = None) -> None:
    """Replace num_iterations by the steps that follow from the model; with problems. `resumed`: the
    tokens that its newest checkpoint has trained on count, in whatever batches they were."""
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
    size, (step, tokens) = config.total_batch_size, done(resumed, config.total_batch_size)
    more = math.ceil(max(0.0, share * parameters - tokens) / size)
    config.num_iterations = max(1, step + more)
    if not auto:
        origins["num_iterations"] = origins["tokens_per_param"]


def done(resumed: RunDir | None, size: int) -> tuple[int, int]:
    """(steps, tokens or samples) of the newest checkpoint, which counts only steps if an early
    version has written it; `size`: of a batch, for those."""
    saved = manifest.newest(resumed.checkpoints) if resumed else None
    step = saved["step"] if saved else 0
    return step, (saved.get("tokens") if saved else 0) or step * size


def growth(own: Config, recorded: Values) -> int:
    """How often the batch of the run to resume contains that of the command that started it; 1 for
    any other command. `own`: what the command itself sets; `recorded`: values of the run."""
    asked = own.total_batch_size
    grown, most = (
        recorded.get(name, (0, ""))[0] for name in ("total_batch_size", "max_total_batch_size")
    )
    may = asked < grown <= min(own.max_total_batch_size, most)
    return grown // asked if may and grown % asked == 0 else 1


def keep_batch(resolved: Resolved, recorded: Values, own: Config) -> None:
    """Give the batch of the run to resume, which was grown, to the command that started it.
    `recorded`, `own`: as in growth()."""
    config, origins, factor = resolved.config, resolved.origins, growth(own, recorded)
    if factor == 1:
        return
    config.total_batch_size, origins["total_batch_size"] = recorded["total_batch_size"]
    asked, steps = origins["num_iterations"], config.num_iterations
    if asked_for(asked) and isinstance(steps, int) and steps:
        config.num_iterations = math.ceil(steps / factor)
        why = msg("plan.larger_batch.origin_steps", steps=steps, factor=factor)
        origins["num_iterations"] = Origin(why, asked.source, asked.name)
