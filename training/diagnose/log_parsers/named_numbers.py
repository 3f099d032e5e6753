"""Pairs of a name and a number in a line of a training log: `loss: 2.31`, `lr=1e-05`."""

from __future__ import annotations

import math
import re

from training.core.metric_units import EVALUATION, SPEEDS
from training.core.units import GIB
from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.metric_names import FIELD, LOSSES

NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?\b(?:nan|inf|NaN|Inf|NAN|INF|Infinity)\b"
)
# `Training loss (for one batch) at step 200: 0.91`
_LOSS_AT = re.compile(
    rf"\bloss\b[^:=\d]{{0,40}} (?:at|after) (?P<what>step|iteration|epoch) (?P<count>\d+)"
    rf" ?[:=] *(?P<loss>{NUMBER})",
    re.I,
)
# `LOSS train 0.31 valid 0.35`: the end of an epoch in a tutorial of PyTorch
_TRAIN_VALID = re.compile(rf"LOSS train (?:{NUMBER}) valid (?P<loss>{NUMBER})")
# `loss: 2.31`, `'loss': '2.31'`, `train loss 2.1`, `lr=[1e-05`, `elapsed time per iteration (ms):
# 120.5`, `iteration  100/ 1000`, `loss tensor(0.31, device='cuda:0')`
_WORDS = r"(?: (?!(?i:nan|inf|infinity)\b)[A-Za-z]+){0,3}"  # more words of a name; nan is a value
_PAIR = re.compile(
    rf"(?<![\w/.@-])(?P<key>[A-Za-z_][\w/.@-]*{_WORDS}(?: ?\((?:ms|s|data|MB|GB)\))?)['\"]?(?: "
    rf"*[:=] *|\s+)(?:tensor(?=\())?['\"\[(]{{0,2}} *"
    rf"(?P<value>{NUMBER})(?P<unit> ?(?:%|(?:ms|[smh]|[KMGT]i?B)\b)|[kKM]\b)?(?: *(?:/|of) "
    rf"*(?P<of>\d[\d,]*)(?![\d.kKM]))?"
)
# `Epoch: [0][  10/5005]`, `[640/60000 (1%)]`
PART = re.compile(r"\[\s*(?P<done>\d+)/\s*(?P<of>\d+)(?: \(|\])")
ETA = re.compile(r"\beta:? *((?:\d+ days?, )?\d+:\d\d(?::\d\d)?)")
_EVAL = re.compile(
    r"(?:(?:average|avg|mean) )?(?P<which>val|valid|validation|eval|test)[ _/.](?P<what>[\w/ ]+)"
    r"|average (?P<psnr>psnr|ssim)",
    re.I,
)
_NO_SCORE = re.compile(
    r"time|runtime|per_second|samples|steps?|epoch|count|tokens|batch|throughput|size|lr\b|freq|interval|every",
    re.I,
)
_EVAL_LINE = re.compile(
    r"^\W*(?:\[[^\]]*\] *)*(?:.{0,60} - |INFO \| )?"
    r"(?:validate|validation|valid|val|eval|evaluation|test)\b(?! loss \d)",
    re.I,
)
# Anywhere in the line: `"split": "val"`, `mode=eval`
_NAMES = r"(?:val|valid|validation|eval|evaluation|test)"
_EVAL_VALUE = re.compile(
    r"(?<![\w-])(?:split|subset|set|mode|phase|stage|type|kind)['\"]? ?[:=] ?['\"]?"
    rf"{_NAMES}(?![\w-])",
    re.I,
)
# `"eval": {"loss": 2.0}`, `[val] loss 2.0`, `| val | loss 2.0`; not a logger's `[test][INFO]`
_EVAL_PART = re.compile(
    rf"['\"]{_NAMES}['\"]: ?\{{[^{{}}]*"
    rf"|(?:\[{_NAMES}\](?!\[)|\| *{_NAMES}(?= *\|)).*?(?=\[train|\| *train|$)",
    re.I,
)
# End of the validation in PyTorch's image examples: ` *   Acc@1 72.130 Acc@5 91.100 loss 1.240`.
_ACCURACY = re.compile(r"^(?:\*|Test:?) +(?:Acc|Prec)@1 ")
_QUICKSTART = re.compile(r"^Accuracy: +[\d.]+%, +Avg loss: ")  # PyTorch's tutorial
_OPENMMLAB = re.compile(r"\b(?:Epoch|Iter)\(val\) *\[")  # any name is that of a score
_OF_ANOTHER = re.compile(r"(?<![^\W_])(?:best|lowest|min|minimum)[ _/]")  # step: `best loss 0.3`
_TOP = re.compile(r"(?:acc|prec)@(\d+)")
# `Loss 5.9164 (5.7825)`: of this batch, and the mean so far
_MEAN = re.compile(rf" *\( *(?P<mean>{NUMBER}) *\)")
_DURATION = re.compile(r"(?:(\d+)d )?(?:(\d+)h )?(\d+)m (\d+)s")  # of ms-swift
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6}
_BYTES = {
    "M": 1 << 20,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": GIB,
    "TiB": 1 << 40,
}


def read(text: str, fact: LogRecord) -> None:
    """Adds the metrics in `text` to `fact`."""
    if ended := _TRAIN_VALID.match(text):
        fact.scores["val_loss"] = to_float(ended["loss"])
        return
    accuracy, any_score = _ACCURACY.match(text) is not None, _OPENMMLAB.search(text) is not None
    evaluation = accuracy or any_score or any(p.match(text) for p in (_EVAL_LINE, _QUICKSTART))
    evaluation = evaluation or _EVAL_VALUE.search(text) is not None
    parts = [part.span() for part in _EVAL_PART.finditer(text)]
    preferred = len(LOSSES)
    for pair in _PAIR.finditer(text):
        key, unit = pair["key"].lower(), (pair["unit"] or "").strip()
        name, value = field_of(key), to_float(pair["value"])
        if name != "memory":
            value = scaled(value, unit)
        if (score := _EVAL.fullmatch(key)) and not _NO_SCORE.search(score["what"] or ""):
            fact.scores.setdefault(_score_name(score), value)
        elif accuracy and (top := _TOP.fullmatch(key)):
            fact.scores.setdefault(f"{EVALUATION}acc{top[1]}", value)
        elif any_score and not name and not _NO_SCORE.search(key):
            fact.scores.setdefault(EVALUATION + key.replace("/", "_"), value)
        elif (
            name == "loss"
            and not key.startswith("train")
            and (evaluation or any(start <= pair.start() < end for start, end in parts))
        ):
            if (mean := _mean_of_all(text, pair.end(), value)) is None:
                fact.validates = True
            else:
                fact.scores.setdefault("val_loss", mean)
        elif name == "loss" and (place := _loss_place(key)) < preferred:
            fact.loss, preferred = value, place
        elif name in ("step", "epoch"):
            _count(fact, name, value, pair["of"])
        elif name == "total steps":
            fact.total = fact.total or int(value)
        elif name in ("lr", "grad_norm", *SPEEDS.values()):
            if getattr(fact, name) is None:
                setattr(fact, name, value)
        elif name == "tokens" and fact.tokens is None and value.is_integer():
            fact.tokens = int(value)
        elif name in ("elapsed", "left") and (long := _DURATION.match(text, pair.start("value"))):
            _measure(fact, name, key, _seconds(long), "s")
        elif name:
            _measure(fact, name, key, value, unit)
    if fact.loss is None and not evaluation and (at := _LOSS_AT.search(text)):
        fact.loss = to_float(at["loss"])
        _count(fact, "epoch" if at["what"].lower() == "epoch" else "step", float(at["count"]), None)
    if fact.scores and "val_loss" in fact.scores and fact.source == "nanoGPT":
        # `step 250: train loss 2.1, val loss 2.3`: an estimate over many batches, not of this step
        fact.loss = None


def _seconds(found: re.Match[str]) -> float:
    days, hours, minutes, rest = (int(group or 0) for group in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _mean_of_all(text: str, end: int, value: float) -> float | None:
    """The loss of an evaluation. `Test: [ 8/79]  Loss 5.9 (5.8)` is of one batch, with the mean so
    far: None, except at the last batch."""
    mean, part = _MEAN.match(text, end), PART.search(text)
    if mean is None or part is None:
        return value
    # torchvision and DeiT print an ETA and count batches from 0 to n-1; others end at n/n.
    last = int(part["of"]) - (ETA.search(text) is not None)
    return to_float(mean["mean"]) if int(part["done"]) == last else None


def field_of(key: str) -> str | None:
    """Field of a name, with or without a meaningless first word: `INFO step`, `[GPU0] loss`,
    `train loss`, `train/lr` of wandb."""
    key = key.removeprefix("train/")
    if key in FIELD:
        return FIELD[key]
    if key.endswith("total steps"):
        return "total steps"
    first, _, rest = key.partition(" ")
    if (
        first
        in (
            "info",
            "debug",
            "train",
            "training",
            "validate",
            "validation",
            "gpu",
            "average",
            "current",
            "global",
        )
        and rest in FIELD
    ):
        return FIELD[rest]
    return "loss" if key.endswith("loss") and not _OF_ANOTHER.search(key) else None


def _loss_place(key: str) -> int:
    return LOSSES.get(key, len(LOSSES) - 1)


def _score_name(found: re.Match[str]) -> str:
    if found["psnr"]:
        return f"val_{found['psnr'].lower()}"
    which = "val" if found["which"].startswith("val") else found["which"]
    return f"{which}_{found['what'].strip().replace(' ', '_').replace('/', '_')}"


def _count(fact: LogRecord, name: str, value: float, of: str | None) -> None:
    total = int(of.replace(",", "")) if of else None
    if not math.isfinite(value):
        return
    if name == "epoch" and fact.epoch is None:
        fact.epoch, fact.epochs = value, total
    elif name == "step" and fact.step is None and value.is_integer():
        fact.step = int(value)
        fact.total = fact.total or total


def _measure(fact: LogRecord, name: str, key: str, value: float, unit: str) -> None:
    """Metrics that need their unit."""
    unit = unit or (
        "ms" if key.endswith("(ms)") else "s" if key.endswith("(s)") or key == "time (data)" else ""
    )
    if name == "dt" and unit in _SECONDS and fact.step_ms is None:
        fact.step_ms = value * _SECONDS[unit] * 1e3
    elif name == "mfu" and fact.mfu is None:
        fact.mfu = value / 100 if unit == "%" or fact.source == "nanochat" else None
    elif name == "memory" and unit in _BYTES and fact.memory_bytes is None:
        fact.memory_bytes = int(value * _BYTES[unit])
    elif name == "elapsed" and unit in _SECONDS and fact.elapsed_s is None:
        fact.elapsed_s = value * _SECONDS[unit]
    elif name == "left" and unit in _SECONDS and fact.eta_s is None:
        fact.eta_s = value * _SECONDS[unit]


def scaled(value: float, unit: str) -> float:
    """10.2 and "k": 10200.0 exactly, as a count of steps has to be."""
    return round(value * _SCALES[unit], 3) if unit in _SCALES else value


def to_float(text: str) -> float:
    """NaN if `text` is not a number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")
