"""One line of a training log → its metrics. A metric that the line does not contain is None."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from training.core.metric_units import EVALUATION, SPEEDS
from training.diagnose import log_line as prefixes
from training.diagnose.log_parsers import progress_bars
from training.diagnose.log_parsers.metric_names import BAR, FIELD, LOSSES, source_of

LONG = 1000  # characters of a line that are parsed
GIB = 1 << 30
# Quick filter: every progress line has a digit after one of these.
HINT = re.compile(
    r"loss|step|iter|epoch|bpb|psnr|\d%\||it/s|s/it|it \[|l_[a-z]+:|━|损失|memory"
    r"|train_runtime|acc",
    re.I,
)
COLOUR = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
)
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?\b(?:nan|inf|NaN|Inf|NAN|INF|Infinity)\b"
)
# `loss: 2.31`, `'loss': '2.31'`, `train loss 2.1`, `lr=[1e-05`, `elapsed time per iteration (ms):
# 120.5`, `iteration  100/ 1000`
_WORDS = r"(?: (?!(?i:nan|inf|infinity)\b)[A-Za-z]+){0,3}"  # more words of a name; nan is a value
_PAIR = re.compile(
    rf"(?<![\w/.@-])(?P<key>[A-Za-z_][\w/.@-]*{_WORDS}(?: ?\((?:ms|s|data|MB|GB)\))?)['\"]?(?: "
    rf"*[:=] *|\s+)['\"\[(]{{0,2}} *"
    rf"(?P<value>{_NUMBER})(?P<unit> ?(?:%|(?:ms|[smh]|[KMGT]i?B)\b))?(?: *(?:/|of) "
    rf"*(?P<of>\d[\d,]*)(?![\d.]))?"
)
_RATE = re.compile(r"(?<![\d,.])(\d[\d,]*(?:\.\d+)?) ?(tok|sample)(?:ens?|s)?/s(?:ec)?\b")
_GAP = re.compile(r"\s{3,}")
# `Epoch: [0][  10/5005]`, `[640/60000 (1%)]`
_PART = re.compile(r"\[\s*(?P<done>\d+)/\s*(?P<of>\d+)(?: \(|\])")
_EPOCH_AT = re.compile(r"\bEpoch:? *\[ *(\d+)(?:/(\d+))? *\]|\bTrain(?: Epoch)?: (\d+) \[")
_MEGATRON_EVAL = re.compile(
    r"validation loss at (?:the end of training|iteration (\d+))[^|]*\| .*?loss value: (\S+)"
)
_MEGATRON_MEMORY = re.compile(r"^\(after \d+ iterations\) memory \(MB\) .*max reserved: ([\d.]+)")
_OWN_EVAL = re.compile(rf"Validation: ({_NUMBER}) (bits/byte|bits per byte|dB)")
_OWN_BITS = re.compile(rf"Loss: (?:{_NUMBER}) bits/byte")
# `Loss       0.0523 → 0.0041; validation psnr 27.1 → 29.8 dB`, see training.trainer.summary
_SUMMARY = re.compile(r"Loss  \S+ → ")
# `Validation: acc 0.9123, wer 0.2`, `Validation: PSNR 29.81 dB (+1.20 over the input), SSIM 0.9123`
_OWN_SCORES = re.compile(rf"(?:Validation:|,) (\w+) ({_NUMBER})(?: dB)?(?: \([^()]*\))?(?=,|$)")
# a task may have another name for its samples
_OWN_RATE = re.compile(r", (\d[\d.]*) (?!tokens)\w+/s$")
_PERCENT = re.compile(r"step \d+ \(([\d.]+)%\)", re.I)
_ETA = re.compile(r"\beta: *((?:\d+ days?, )?\d+:\d\d(?::\d\d)?)")
_EVAL = re.compile(
    r"(?:average )?(?P<which>val|valid|validation|eval|test)[ _/.](?P<what>[\w/ ]+)|average "
    r"(?P<psnr>psnr|ssim)",
    re.I,
)
_NO_SCORE = re.compile(
    r"time|runtime|per_second|samples|steps?|epoch|count|tokens|batch|throughput|size|lr\b|freq|interval|every",
    re.I,
)
_EVAL_LINE = re.compile(
    r"^\W*(?:\[[^\]]*\] *)*(?:.{0,60} - "
    r")?(?:validate|validation|valid|val|eval|evaluation|test)\b(?! loss \d)",
    re.I,
)
# End of the validation in PyTorch's image examples: ` *   Acc@1 72.130 Acc@5 91.100 loss 1.240`.
_ACCURACY = re.compile(r"^(?:\*|Test:?) +(?:Acc|Prec)@1 ")
_TOP = re.compile(r"(?:acc|prec)@(\d+)")
# `Loss 5.9164 (5.7825)`: of this batch, and the mean so far
_MEAN = re.compile(rf" *\( *(?P<mean>{_NUMBER}) *\)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": GIB,
    "TiB": 1 << 40,
}


@dataclass
class LogRecord:
    """Metrics of one line."""

    offset: int = 0
    rank: int | None = None
    time: float | None = None  # timestamp of the line, for differences only
    source: str | None = None
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: int | None = None
    loss: float | None = None
    bits: bool = False  # the loss is in bits per byte
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    mfu: float | None = None  # 0..1
    memory_bytes: int | None = None
    elapsed_s: float | None = None
    eta_s: float | None = None
    percent: float | None = None  # if given beside the step
    scores: dict[str, float] = field(default_factory=dict)  # of an evaluation
    validates: bool = False  # a batch of an evaluation, whose score is not known yet
    bar: bool = False
    whole_epoch: bool = False  # step and total are counted within an epoch

    @property
    def tells(self) -> bool:
        """Whether it shows the progress of the training."""
        return self.step is not None or self.loss is not None or bool(self.scores) or self.validates

    @property
    def complete(self) -> bool:
        """Whether it is a bar at its end, which programs redraw repeatedly."""
        return self.bar and self.total is not None and self.step == self.total


def columns(start: str) -> list[str]:
    """Column names in the first line of a .csv of metrics; empty for any other log."""
    names = [name.strip().strip('"') for name in start.lstrip().split("\n", 1)[0].split(",")]
    known = {_field(name.lower()) for name in names}
    return (
        names
        if len(names) > 1
        and "loss" in known
        and ("step" in known or "epoch" in known)
        and all(map(_COLUMN.fullmatch, names))
        else []
    )


def of_row(row: str, names: list[str]) -> str:
    """A row of a .csv in the form `name: value, …`; any other line unchanged."""
    values = row.split(",")
    return (
        ", ".join(f"{n}: {v}" for n, v in zip(names, values, strict=True) if v)
        if len(values) == len(names)
        else row
    )


def parse(raw: str, offset: int = 0) -> LogRecord | None:
    """Metrics of a line; None without any."""
    if not HINT.search(raw):
        return None
    nested = raw.rstrip().endswith(progress_bars.NESTED)
    plain = COLOUR.sub("", raw) if "\x1b" in raw else raw
    text, rank = prefixes.split(_GAP.sub("  ", plain[:LONG]).strip())
    text = text.strip()
    if bar := progress_bars.find(text):
        # A Hugging Face dict and a bar never share a segment; text beside a bar is parsed like any
        # other.
        return None if bar.other or nested else _of_bar(text, bar, LogRecord(offset, rank))
    fact = LogRecord(offset, rank)
    _stamp(plain, fact)
    text = _TIMESTAMP.sub("", text)
    fact.source = source_of(text)
    # the loss here is the mean of all steps, or those of the first and the last step
    if "'train_runtime'" in text or _SUMMARY.match(text):
        return None
    if found := _MEGATRON_EVAL.search(text):
        fact.step = int(found[1]) if found[1] else None
        fact.scores = {"val_loss": _float(found[2])}
        return fact
    _pairs(text, fact)
    _special(text, fact)
    if fact.step is None and (found := _PART.search(text)):
        _within_epoch(text, found, fact)
    known = (fact.total, fact.epochs, fact.memory_bytes)
    return fact if fact.tells or any(value is not None for value in known) else None


def _special(text: str, fact: LogRecord) -> None:
    """Metrics that are not a pair of name and number."""
    if fact.tokens_per_s is None and fact.samples_per_s is None and (found := _RATE.search(text)):
        setattr(fact, "tokens_per_s" if found[2] == "tok" else "samples_per_s", _float(found[1]))
    if fact.source == "Duet" and fact.samples_per_s is None and (found := _OWN_RATE.search(text)):
        fact.samples_per_s = _float(found[1])
    if fact.eta_s is None and (found := _ETA.search(text)):
        fact.eta_s = progress_bars.seconds(found[1])
    if fact.total is None and (found := _PERCENT.match(text)):
        fact.percent = _float(found[1])
    fact.bits = fact.source == "Duet" and bool(_OWN_BITS.search(text))
    if fact.source == "Duet" and (found := _OWN_EVAL.search(text)):
        fact.scores = {"val_bpb" if "byte" in found[2] else "val_psnr": _float(found[1])}
    elif fact.source == "Duet" and "Validation: " in text:
        fact.scores = {
            f"{EVALUATION}{name.lower()}": _float(value)
            for name, value in _OWN_SCORES.findall(text)
        }
    if fact.memory_bytes is None and (found := _MEGATRON_MEMORY.search(text)):
        fact.memory_bytes, fact.source = (
            int(_float(found[1]) * (1 << 20)),
            fact.source or "Megatron",
        )


_COLUMN = re.compile(r"[A-Za-z_][\w/ .@-]{0,60}")
# Prefix of a logger.
_TIMESTAMP = re.compile(
    r"^\[?(?:\d{4}|\d\d)[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,:]\d+)?\]?(?: *:)? "
    r"*(?:(?:-|\[\w+\]|INFO|DEBUG|WARNING)[ :]*)*"
)
_SHORT_TIME = re.compile(r"^\[?(\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")


def _stamp(plain: str, fact: LogRecord) -> None:
    if short := _SHORT_TIME.match(plain):  # KAIR: a year of two digits
        plain = f"20{short[1]}"
    fact.time = prefixes.time_of(plain) if plain[:40].count(":") >= 2 else None


def _of_bar(text: str, bar: progress_bars.ProgressBar, fact: LogRecord) -> LogRecord:
    fact.bar = True
    if bar.of_epochs:
        fact.epoch, fact.epochs = float(bar.done), bar.total
        return fact
    fact.step, fact.total = bar.done, bar.total
    fact.elapsed_s, fact.eta_s, fact.step_ms = bar.elapsed_s, bar.left_s, bar.step_ms
    fact.epoch, fact.epochs = bar.epoch, bar.epochs
    fact.whole_epoch = bar.epoch is not None or bar.kind == "keras"
    fact.source = source_of(text) or (BAR if bar.kind == "tqdm" else None)
    if bar.rest and bar.done:  # at 0 it shows values of the previous epoch
        beside = LogRecord()
        _pairs(bar.rest, beside)
        fact.loss, fact.lr, fact.grad_norm, fact.scores = (
            beside.loss,
            beside.lr,
            beside.grad_norm,
            beside.scores,
        )
        fact.tokens_per_s, fact.samples_per_s = beside.tokens_per_s, beside.samples_per_s
        fact.mfu, fact.memory_bytes = beside.mfu, beside.memory_bytes
        fact.epoch = fact.epoch if fact.epoch is not None else beside.epoch
    return fact


def _within_epoch(text: str, found: re.Match[str], fact: LogRecord) -> None:
    """Progress within an epoch: `Train Epoch: 1 [640/60000 (1%)] Loss: 0.5`, `Epoch: [0][  10/5005]
    Loss 6.9`."""
    at = _EPOCH_AT.search(text)
    if at and fact.loss is not None:
        fact.step, fact.total, fact.whole_epoch = int(found["done"]), int(found["of"]), True
        fact.epoch = float(at[1] or at[3])
        fact.epochs = int(at[2]) if at[2] else None


def _pairs(text: str, fact: LogRecord) -> None:
    accuracy = _ACCURACY.match(text) is not None
    evaluation = accuracy or _EVAL_LINE.match(text) is not None
    preferred = len(LOSSES)
    for pair in _PAIR.finditer(text):
        key, unit = pair["key"].lower(), (pair["unit"] or "").strip()
        name, value = _field(key), _float(pair["value"])
        if (score := _EVAL.fullmatch(key)) and not _NO_SCORE.search(score["what"] or ""):
            fact.scores.setdefault(_score_name(key, score), value)
        elif accuracy and (top := _TOP.fullmatch(key)):
            fact.scores.setdefault(f"{EVALUATION}acc{top[1]}", value)
        elif name == "loss" and evaluation:
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
        elif name:
            _measure(fact, name, key, value, unit)
    if fact.scores and "val_loss" in fact.scores and fact.source == "nanoGPT":
        # `step 250: train loss 2.1, val loss 2.3`: an estimate over many batches, not of this step
        fact.loss = None


def _mean_of_all(text: str, end: int, value: float) -> float | None:
    """The loss of an evaluation. `Test: [ 8/79]  Loss 5.9 (5.8)` is of one batch, with the mean so
    far: None, except at the last batch."""
    mean, part = _MEAN.match(text, end), _PART.search(text)
    if mean is None or part is None:
        return value
    # torchvision and DeiT print an ETA and count batches from 0 to n-1; others end at n/n.
    last = int(part["of"]) - (_ETA.search(text) is not None)
    return _float(mean["mean"]) if int(part["done"]) == last else None


def _field(key: str) -> str | None:
    """Field of a name, with or without a meaningless first word: `INFO step`, `[GPU0] loss`,
    `train loss`."""
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
    return "loss" if key.endswith("loss") else None


def _loss_place(key: str) -> int:
    return LOSSES.get(key, len(LOSSES) - 1)


def _score_name(key: str, found: re.Match[str]) -> str:
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


def _float(text: str) -> float:
    """NaN if `text` is not a number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")
