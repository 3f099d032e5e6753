"""Units and names of a run's metrics: tokens of text or samples of anything else; the same on the
screen, in metrics.jsonl, in the report and in the closing summary.

`facts` is a record of metrics.jsonl or a summary, in which a task may use its own word for samples
(clips), or `training` of a state, which always has the key `samples` and holds that word in `unit`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from training.core import units
from training.core.jsonl import dig, number, text, whole
from training.core.messages import msg

TOKENS = "tokens"
COUNTED = (TOKENS, "samples")
PER_S = "_per_s"
SPEEDS = {unit: unit + PER_S for unit in COUNTED}
NATS, BITS = "nats/token", "bits/byte"
# The first and last loss of a run are means over 1/ENDS_SHARE of its steps, at most ENDS_MOST.
ENDS_SHARE, ENDS_MOST = (
    20,
    50,
)
EVALUATION = "val_"  # prefix of every evaluation metric
PLAIN = "val_loss"  # compared only if there is no other score
INPUT = "_input"  # suffix of a score of the model's input: the baseline of the same score
SCORES = {"bpb": BITS, "psnr": "dB"}  # units, by part of the name
# Which values of a score are better, by the last of these in its name.
_BETTER = re.compile(
    r"(?P<lower>loss|err(or)?[-_]?top[-_@]?\d+|error|err(?![a-z])|bpb|ppl|perplexity|brier|(?<![a-z])("
    r"dssim|wer|cer|r?mse|mae|mape|dist|distance|gap|drop|fpr|fnr|eer|hter|fid|kid|lpips"
    r"|(?<!acc_)(?<!accuracy_)(?<!f1_)(?<!precision_)(?<!recall_)(?<!map_)l[12]|niqe|perceptual|nll|crps|ece|calibration|epe|davies_bouldin"
    r")(?![a-z]))"
    r"|(?P<higher>psnr|accuracy|bleu|rouge|reward|(?<![a-z])("
    r"[a-z]*ssim[a-z]?|[a-z]*acc|top[-_@]?\d+|f1|(roc|pr)?auc|auroc|auprc|m?iou|dice|jaccard|m?ap|core"
    r"|recall|precision|sensitivity|specificity|mcc|kappa|r2|pearson|spearman|ndcg|mrr|meteor|cider"
    r")(?![a-z]))"
)
# the norm of a difference of maps, or the mean average precision at a level of difficulty
_UNCLEAR = re.compile(r"(?<![a-z])maph?_l[12]$")
_CONDITION = re.compile(r"_at_|@(?=[a-z])")  # what follows is not the score: fpr_at_recall95
SCORE = "_score"  # makes a name without any of them one of which higher values are better
PER_TOKEN = ("loss", "perplexity", TOKENS + PER_S)
FIRST, LAST = "_first", "_last"
AVERAGED = {"weights": "ema"}  # in the record of an evaluation of the averaged weights (--ema)
DATA = ("dataroot_gt", "data")  # task options that name the training data
VALIDATION, FRAMES = "test_dataroot_gt", "test_num_frame"  # and other validation data


def counted(facts: Mapping[str, Any]) -> str | None:
    """The unit: 'tokens', 'samples' or the task's own word; None if unknown."""
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
    """The number of tokens or samples so far."""
    return whole(facts.get(counted(facts) or TOKENS))


def speed(facts: Mapping[str, Any]) -> float | None:
    """Tokens or samples per second, all ranks together."""
    return number(facts.get((counted(facts) or TOKENS) + PER_S))


def one(unit: str | None) -> str:
    """One of the units, in a quotient: J/token."""
    return (unit or TOKENS).removesuffix("s")


def as_samples(unit: str | None) -> str:
    """'tokens' or 'samples'; a task's own word counts as samples."""
    return TOKENS if unit in (None, TOKENS) else "samples"


def loss_unit(facts: Mapping[str, Any]) -> str | None:
    return NATS if counted(facts) == TOKENS else None


def bits_per_byte(bytes_per_token: float) -> float:
    """The factor from nats per token to bits per byte."""
    return 1 / (math.log(2) * bytes_per_token)


def display(facts: Mapping[str, Any]) -> tuple[float, str | None]:
    """(factor, unit) for displaying a loss: bits per byte if the bytes per token are known, so that
    it compares with evaluations; otherwise the recorded unit. `facts`: a summary, or `training` of
    a state."""
    density = number(facts.get("bytes_per_token"))
    if density and density > 0 and counted(facts) == TOKENS:
        factor = bits_per_byte(density)
        if 0 < factor < math.inf:  # else the record is damaged
            return factor, BITS
    return 1.0, facts["loss_unit"] if "loss_unit" in facts else loss_unit(facts)


def course(summary: Mapping[str, Any]) -> str:
    """The loss at the beginning and end of a run, with its unit: '5.51 → 2.13 bits/byte'. Both are
    means over several steps, since single batches differ."""
    ends = [
        number(summary.get(f"loss_{which}", summary.get(f"loss_{single}")))
        for which, single in (("begin", "first"), ("end", "last"))
    ]
    factor, unit = display(summary)
    form: Callable[[float], str] = (
        functools.partial(units.decimal, places=3) if unit else units.significant
    )
    shown = " → ".join("-" if value is None else form(value * factor) for value in ends)
    return f"{shown} {unit}" if unit else shown


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last losses."""
    some = at_end(len(losses))
    return sum(losses[:some]) / some, sum(losses[-some:]) / some


def at_end(steps: int) -> int:
    """How many losses the first and the last loss of a run are means of."""
    return min(ENDS_MOST, max(1, steps // ENDS_SHARE))


def plain(key: str) -> str:
    """val_psnr_input → psnr input."""
    return key.removeprefix(EVALUATION).replace("_", " ")


def score_unit(key: str) -> str | None:
    words = key.lower().split("_")
    return next((unit for word, unit in SCORES.items() if word in words), None)


def better_if_higher(key: str) -> bool | None:
    """None: unknown."""
    name = key.lower()
    if _UNCLEAR.search(name):
        return None
    measured = _CONDITION.split(name)[0]
    found = [match["higher"] is not None for match in _BETTER.finditer(measured)]
    return found[-1] if found else name.endswith(SCORE) or None


def higher_is_better(key: str) -> bool:
    return better_if_higher(key) is True


def scores(keys: Iterable[str]) -> list[str]:
    """The evaluation metrics without duplicates, in the task's order; the first is the one that
    runs are compared by. `val_loss` and baselines come last."""
    names = dict.fromkeys(key for key in keys if key.startswith(EVALUATION))
    return sorted(names, key=lambda name: (name.endswith(INPUT), name == PLAIN))


def main_score(figures: Mapping[str, Any]) -> tuple[str, float] | None:
    """Name and value of the score that evaluations are compared by; None: not a finite number."""
    name = next(iter(scores(figures)), "")
    value = number(figures.get(name))
    return (name, value) if value is not None and math.isfinite(value) else None


def of_averaged(record: Mapping[str, Any]) -> bool:
    """Whether an evaluation in metrics.jsonl is of the averaged weights."""
    return AVERAGED.items() <= record.items()


def rank_of(name: str, value: float) -> float:
    """A number by which to sort evaluations; lower is better."""
    return -value if higher_is_better(name) else value


def is_per_token(key: str) -> bool:
    """Whether the values of a text are per token: models with different tokenizers cannot be
    compared by them."""
    return plain(key).replace(" ", "_") in PER_TOKEN


def of_the_input(key: str, keys: Iterable[str]) -> bool:
    """Whether `key` is the baseline of another of these scores."""
    return key.endswith(INPUT) and key.removesuffix(INPUT) in keys


def courses(summary: Mapping[str, Any]) -> list[str]:
    """Each score from the first validation to the last: ['psnr 27.1 → 29.8 dB', 'psnr input 25.3
    dB']."""
    out = []
    for name in scores(key.removesuffix(LAST) for key in summary if key.endswith(LAST)):
        first, last = number(summary.get(name + FIRST)), number(summary.get(name + LAST))
        if first is not None and last is not None:
            values = dict.fromkeys(units.significant(value) for value in (first, last))
            out.append(" ".join(filter(None, [plain(name), " → ".join(values), score_unit(name)])))
    return out


def data(plan: Mapping[str, Any] | None) -> str | None:
    """The name of the training data; None if a user task does not have it."""
    options = dig(plan, "task", "options")
    return text(dig(plan, "data", "name")) or next(
        (name for key in DATA if (name := text(dig(options, key)))), None
    )


def data_basis(plan: Mapping[str, Any] | None, key: str) -> tuple[str | None, float | None]:
    """The same for runs of which this score or training loss can be compared, as far as the data
    decides."""
    options = dig(plan, "task", "options")
    if key.startswith(EVALUATION) and (name := text(dig(options, VALIDATION))):
        return name, number(dig(options, FRAMES))
    return data(plan), number(dig(plan, "data", "bytes"))


def memory_word(on_gpu: bool) -> str:
    """What the memory of a step or rank is called, which in Chinese depends on the device."""
    return msg("core.memory.gpu") if on_gpu else msg("core.memory.host")


def pieces(plan: Mapping[str, Any] | None) -> str:
    """The elements of the data set, in words: samples or sequences."""
    return piece_word("samples" if dig(plan, "task", "unit") == "samples" else "sequences")


def piece_word(pieces: str, count: int = 0) -> str:
    """A task's unit of its data set in the selected language, for `count` of them; another word as
    it is."""
    known = {
        "sample": msg("core.pieces.sample"),
        "sequence": msg("core.pieces.sequence"),
        "samples": msg("core.pieces.samples"),
        "sequences": msg("core.pieces.sequences"),
    }
    word = pieces.removesuffix("s") if count == 1 else pieces
    return known.get(word, word)
