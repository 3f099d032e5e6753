"""What a run counts (tokens of text, samples of anything else) and what its figures are called: the
same on the screen, in the metrics, in the report and in the last words of a run.

`facts` is a record of metrics.jsonl or a summary, in which a task may have a word of its own for
its samples (clips), or the `training` of a state, in which they are always called samples and the
word stands under `unit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training.core.jsonl import dig, number, text, whole

TOKENS = "tokens"
COUNTED = (TOKENS, "samples")
PER_S = "_per_s"
SPEEDS = {unit: unit + PER_S for unit in COUNTED}
NATS, BITS = "nats/token", "bits/byte"
# the loss at an end of a run is the mean of this part of its steps, of so many at most
ENDS_SHARE, ENDS_MOST = (
    20,
    50,
)
EVALUATION = "val_"  # every figure of an evaluation begins so
PLAIN = "val_loss"  # stands for those that have no better one
INPUT = (
    "_input"  # a score of what the model is given: what the score of the same name has to surpass
)
SCORES = {"bpb": BITS, "psnr": "dB"}  # units, by a word of the name
HIGHER_IS_BETTER = ("psnr", "ssim", "acc")
FIRST, LAST = "_first", "_last"
DATA = ("dataroot_gt", "data")  # options that say what a task trains on


def counted(facts: Mapping[str, Any]) -> str | None:
    """The unit: 'tokens', 'samples', or a task's own word; None where nothing is told."""
    known = next(
        (
            unit
            for unit in COUNTED
            if facts.get(unit) is not None or facts.get(SPEEDS[unit]) is not None
        ),
        None,
    )
    return known or next(
        (
            key.removesuffix(PER_S)
            for key in facts
            if key.endswith(PER_S) and key not in SPEEDS.values()
        ),
        None,
    )


def so_far(facts: Mapping[str, Any]) -> int | None:
    """How many of them."""
    return whole(facts.get(counted(facts) or TOKENS))


def speed(facts: Mapping[str, Any]) -> float | None:
    """So many per second, all ranks together."""
    return number(facts.get((counted(facts) or TOKENS) + PER_S))


def as_samples(unit: str | None) -> str:
    """'tokens' or 'samples', whatever the word."""
    return TOKENS if unit in (None, TOKENS) else "samples"


def loss_unit(facts: Mapping[str, Any]) -> str | None:
    return NATS if counted(facts) == TOKENS else None


def bits_per_byte(bytes_per_token: float) -> float:
    """What a loss in nats per token is multiplied by."""
    return 1 / (math.log(2) * bytes_per_token)


def display(facts: Mapping[str, Any]) -> tuple[float, str | None]:
    """How a loss is shown: in the unit of the evaluations (bits per byte) where the text's bytes
    per token are known, so that both can be compared; else as it is recorded, with its unit.
    `facts`: a summary, or the `training` of a state."""
    if (density := number(facts.get("bytes_per_token"))) and counted(facts) == TOKENS:
        return bits_per_byte(density), BITS
    return 1.0, facts["loss_unit"] if "loss_unit" in facts else loss_unit(facts)


def course(summary: Mapping[str, Any]) -> str:
    """The loss of a run from its begin to its end, with its unit: '5.51 → 2.13 bits/byte'. Each is
    a mean over some steps, since single batches differ."""
    ends = [
        number(summary.get(f"loss_{which}", summary.get(f"loss_{single}")))
        for which, single in (("begin", "first"), ("end", "last"))
    ]
    factor, unit = display(summary)
    form = ".3f" if unit else ".4g"
    shown = " → ".join("-" if value is None else format(value * factor, form) for value in ends)
    return f"{shown} {unit}" if unit else shown


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """The mean of the first and of the last steps."""
    some = min(ENDS_MOST, max(1, len(losses) // ENDS_SHARE))
    return sum(losses[:some]) / some, sum(losses[-some:]) / some


def plain(key: str) -> str:
    """val_psnr_input → psnr input."""
    return key.removeprefix(EVALUATION).replace("_", " ")


def score_unit(key: str) -> str | None:
    words = key.lower().split("_")
    return next((unit for word, unit in SCORES.items() if word in words), None)


def higher_is_better(key: str) -> bool:
    return any(word in key for word in HIGHER_IS_BETTER) and not key.endswith(("loss", "error"))


def scores(keys: Iterable[str]) -> list[str]:
    """Those of an evaluation, each once; the one that runs are compared by first: the first that
    its task tells, better not the loss."""
    names = dict.fromkeys(key for key in keys if key.startswith(EVALUATION))
    return sorted(names, key=lambda name: (name.endswith(INPUT), name == PLAIN))


def of_the_input(key: str, keys: Iterable[str]) -> bool:
    """Does it only say what another of these scores has to surpass?"""
    return key.endswith(INPUT) and key.removesuffix(INPUT) in keys


def courses(summary: Mapping[str, Any]) -> list[str]:
    """Each score from the first validation to the last: ['psnr 27.1 → 29.8 dB', 'psnr input 25.3
    dB']."""
    out = []
    for name in scores(key.removesuffix(LAST) for key in summary if key.endswith(LAST)):
        first, last = number(summary.get(name + FIRST)), number(summary.get(name + LAST))
        if first is not None and last is not None:
            values = dict.fromkeys(f"{value:.4g}" for value in (first, last))
            out.append(" ".join(filter(None, [plain(name), " → ".join(values), score_unit(name)])))
    return out


def data(plan: Mapping[str, Any] | None) -> str | None:
    """What a run trains on; a task of somebody's own may not say."""
    options = dig(plan, "task", "options")
    return text(dig(plan, "data", "name")) or next(
        (name for key in DATA if (name := text(dig(options, key)))), None
    )


def pieces(plan: Mapping[str, Any] | None) -> str:
    """What its data set is made of."""
    return "samples" if dig(plan, "task", "unit") == "samples" else "sequences"
