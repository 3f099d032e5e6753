"""One line of a training log → its metrics. A metric that the line does not contain is None."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from training.core.metric_units import EVALUATION
from training.diagnose import log_line as prefixes
from training.diagnose.log_parsers import (
    chinese_names,
    named_numbers,
    progress_bars,
    toolkit_lines,
    unnamed_steps,
)
from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.metric_names import BAR, source_of
from training.diagnose.log_parsers.named_numbers import ETA, NUMBER, to_float

LONG = 1000  # characters of a line that are parsed
REDRAWN_MS = 10_000  # a bar of tqdm is redrawn at least this often (maxinterval)
# Quick filter: every progress line has a digit after one of these.
HINT = re.compile(
    r"loss|step|iter|epoch|bpb|psnr|\d%\||it/s|s/it|it \[|l_[a-z]+:|━|损失|步|轮|迭代|memory"
    r"|train_runtime|acc|^ +all  ",
    re.I,
)
COLOUR = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
)
_RATE = re.compile(
    r"(?<![a-zA-Z\d,.])(\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)([kKM]?) ?(tok|sample)"
    r"(?:ens?|s)?/s(?:ec)?\b"
)
_GAP = re.compile(r"\s{3,}|\t")
_MEGATRON_EVAL = re.compile(
    r"validation loss at (?:the end of training|iteration (\d+))[^|]*\| .*?loss value: (\S+)"
)
_MEGATRON_MEMORY = re.compile(r"^\(after \d+ iterations\) memory \(MB\) .*max reserved: ([\d.]+)")
_OWN_EVAL = re.compile(rf"Validation: ({NUMBER}) (bits/byte|bits per byte|dB)")
_OWN_BITS = re.compile(rf"Loss: (?:{NUMBER}) bits/byte")
# `Loss       0.0523 → 0.0041; validation psnr 27.1 → 29.8 dB`, see training.trainer.summary
_SUMMARY = re.compile(r"Loss  \S+ → ")
# the line below a bar of YOLO's validation: images, objects, precision, recall, mAP50, mAP50-95
_YOLO_EVAL = re.compile(rf"all(?: +(?:{NUMBER})){{4}} +(?P<map50>{NUMBER}) +(?P<map>{NUMBER})\b")
# `Averaged stats: lr: 0.001  loss: 1.23 (2.34)`, at the end of an epoch of DETR, DINO, MAE
_AVERAGED = re.compile(r"\bAveraged (?:\w+ )?stats: ")
# `Loaded checkpoint (step 2000, loss 1.93)`, not `step 10 loss 1.0 loading from disk 0.2s`
_RESTORED = re.compile(
    r"(?:(?!loss|\b(?:step|iter)\b).){0,60}?"
    r"\b(?:loaded|loading|resumed|resuming|restored|restoring) "
    r"(?:\w+ ){0,3}(?:checkpoint|snapshot|model|weights|state|from|training|run|at)\b",
    re.I,
)
# `Validation: acc 0.9123, wer 0.2`, `Validation: PSNR 29.81 dB (+1.20 over the input), SSIM 0.9123`
_OWN_SCORES = re.compile(rf"(?:Validation:|,) (\w+) ({NUMBER})(?: dB)?(?: \([^()]*\))?(?=,|$)")
# a task may have another name for its samples
_OWN_RATE = re.compile(r", (\d[\d.]*) (?!tokens)\w+/s$")
# `Namespace(lr=0.1, steps=1000)`, `{'epochs': 10, 'steps': 1000}`: options, unless there is a loss;
# not `epochs: 1.25` or `epochs 3 of 10`, nor `step=100: Metrics(acc=0.5)`
_OPTIONS = re.compile(
    r"(?![^(]*(?:step|iter)\w* ?[:=] ?\d+ ?:)(?:\w+ ?[:=] ?)*[a-zA-Z]\w*\(\w+="
    r"|.*\bepochs['\"]?(?: ?[:=] ?| )\d+\b(?!\.\d| ?/| of )",
    re.I,
)
_PERCENT = re.compile(r"step \d+ \(([\d.]+)%\)", re.I)


def columns(start: str) -> list[str]:
    """Column names in the first line of a .csv of metrics; empty for any other log."""
    names = [name.strip().strip('"') for name in start.lstrip().split("\n", 1)[0].split(",")]
    known = {named_numbers.field_of(name.lower()) for name in names}
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
    plain = COLOUR.sub("", raw) if "\x1b" in raw else raw
    start = _GAP.sub("  ", plain[:LONG]).strip()
    text, rank = prefixes.split(start)
    text = chinese_names.in_english(text.strip())
    if bar := progress_bars.find(text):
        nested = "\x1b" in raw and progress_bars.NESTED.search(raw)
        fact = None if bar.other or nested else _of_bar(text, bar, LogRecord(offset, rank))
        printed = parse(bar.behind, offset) if bar.behind else None
        if printed and printed.trained:
            return replace(fact, trained=True) if fact else printed
        if printed is None or printed.bar or (printed.loss is None and not printed.scores):
            return fact
        return _with_text_behind(fact, printed) if fact else replace(printed, behind_bar=True)
    fact = LogRecord(offset, rank)
    _stamp(plain, fact)
    text = _TIMESTAMP.sub("", text)
    fact.source = source_of(text)
    # the loss here is the mean of many steps, or those of the first and the last step
    if "'train_runtime'" in text:
        fact.trained = True
        return fact
    if _SUMMARY.match(text) or _AVERAGED.search(text) or _RESTORED.match(text):
        return None
    if found := _YOLO_EVAL.match(text):
        fact.scores = {f"val_{name}": to_float(value) for name, value in found.groupdict().items()}
        return fact
    if found := _MEGATRON_EVAL.search(text):
        fact.step = int(found[1]) if found[1] else None
        fact.scores = {"val_loss": to_float(found[2])}
        return fact
    if toolkit_lines.read(text, fact):
        return fact
    named_numbers.read(text, fact)
    if fact.step is not None and fact.loss is None and not fact.scores and _OPTIONS.match(text):
        return None
    _special(text, fact)
    if fact.step is None and fact.loss is not None:
        unnamed_steps.read(text, fact)
    if fact.step is None and fact.epoch is None and fact.loss is not None:
        fact.number = unnamed_steps.number_before(start)
    if fact.epoch is not None:
        unnamed_steps.read_heading(text, fact)
    known = (fact.total, fact.epochs, fact.memory_bytes)
    told = fact.tells or fact.heading or any(value is not None for value in known)
    return fact if told else None


def _special(text: str, fact: LogRecord) -> None:
    """Metrics that are not a pair of name and number."""
    if fact.tokens_per_s is None and fact.samples_per_s is None and (found := _RATE.search(text)):
        rate = named_numbers.scaled(to_float(found[1]), found[2])
        setattr(fact, "tokens_per_s" if found[3] == "tok" else "samples_per_s", rate)
    if fact.source == "Duet" and fact.samples_per_s is None and (found := _OWN_RATE.search(text)):
        fact.samples_per_s = to_float(found[1])
    if fact.eta_s is None and (found := ETA.search(text)):
        fact.eta_s = progress_bars.seconds(found[1])
    if fact.total is None and (found := _PERCENT.match(text)):
        fact.percent = to_float(found[1])
    fact.bits = fact.source == "Duet" and bool(_OWN_BITS.search(text))
    if fact.source == "Duet" and (found := _OWN_EVAL.search(text)):
        fact.scores = {"val_bpb" if "byte" in found[2] else "val_psnr": to_float(found[1])}
    elif fact.source == "Duet" and "Validation: " in text:
        fact.scores = {
            f"{EVALUATION}{name.lower()}": to_float(value)
            for name, value in _OWN_SCORES.findall(text)
        }
    if fact.memory_bytes is None and (found := _MEGATRON_MEMORY.search(text)):
        fact.memory_bytes, fact.source = (
            int(to_float(found[1]) * (1 << 20)),
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
    if bar.done:  # at 0 it shows values of the previous epoch
        beside = LogRecord()
        named_numbers.read(bar.head, beside)
        named_numbers.read(bar.rest, beside)
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


def _with_text_behind(bar: LogRecord, text: LogRecord) -> LogRecord:
    """A bar and the metrics printed behind it: of the bar's step, unless they have another one."""
    if text.rank not in (None, bar.rank):
        return text
    told = {
        name: value
        for name, value in vars(text).items()
        if value is not None and value is not False and value != {}
    }
    if text.step is not None and not _counts_alike(bar, text):
        if not bar.whole_epoch:
            text.epoch = bar.epoch if text.epoch is None else text.epoch
            text.epochs = bar.epochs if text.epochs is None else text.epochs
            return text
        for name in ("step", "total", "epoch", "epochs"):
            told.pop(name, None)
    return replace(bar, **told, behind_bar=True)


def _counts_alike(bar: LogRecord, text: LogRecord) -> bool:
    """Whether a bar counts the steps that the text behind it counts: from 0 or 1, and perhaps not
    redrawn for a while."""
    if bar.step is None or text.step is None:
        return False
    late = REDRAWN_MS / bar.step_ms if bar.step_ms else math.inf
    return (
        -1 <= text.step - bar.step <= 1 + late
        and (bar.total is None or text.step <= bar.total)
        and text.total in (None, bar.total)
        and text.epoch in (None, bar.epoch)
    )
