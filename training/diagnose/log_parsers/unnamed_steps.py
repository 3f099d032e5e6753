"""Epoch and step of a line that has a loss but does not call its count a step: `[1,  2000] loss:
2.193`, `Epoch: [0][  10/5005]`, `Batch 100/938`, `[   64/60000]`."""

from __future__ import annotations

import re

from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.named_numbers import PART

# `Epoch: [2/100]`, `Epoch(train) [1]`, `Train Epoch: 1 [`, `Train: [0/300][`
_EPOCH_AT = re.compile(
    r"\b(?:Epoch(?:\(train\))?:? *\[|Train(?: Epoch)?: (?=\d+ \[)|Train: \[(?=\d+/\d+\]\[)) *"
    r"(?P<epoch>\d+)(?:/(?P<epochs>\d+))?(?: *\]| (?=\[))"
)
# `Training  [   10/125000]`, `Iter(train) [  50/160000]`
_OF_RUN = re.compile(r"\b(?:Training:?|Iter\(train\)) *\[ *(?P<done>\d+)/(?P<of>\d+)\](?! *\[)")
# Counts within the epoch that the line names, or a heading above `  batch 1000 loss: 1.73`.
_BATCH = re.compile(
    r"(?<!\d)(?P<of_batches>\d+)/ *(?P<batches>\d+) batches\b"
    r"|(?<![\w/.-])(?:mini-?)?batch(?:[_ ](?:idx|index|number))?\W{0,3}(?P<batch>\d+)"
    r"(?: *(?:/|of) *(?P<of>\d+))?(?![\w.])",
    re.I,
)
# `Epoch 1/10 [100/938]`, `Epoch:[1/10](100/938)`, `epoch 1: 100/938`
_BESIDE_EPOCH = re.compile(
    r"\bep(?:och)?\W{0,3}\d+(?: ?/ ?\d+)?\W{1,4}(?P<done>\d+) ?/ ?(?P<of>\d+)(?=[\])\s,:|-]|$)",
    re.I,
)
# `[1,  2000] loss: 2.193`: epoch and batch
_PAIR = re.compile(
    r"\[(?P<epoch>\d+), *(?P<step>\d+)(?: ?/ ?(?P<total>\d+))?\]:? *(?:[a-z]+ ){0,2}loss\b", re.I
)
# `[1/25][10/1583] Loss_D: 0.5`: epoch and batch
_PAIR_OF = re.compile(
    r"\[(?P<epoch>\d+) ?/ ?(?P<epochs>\d+)\] ?\[ *(?P<step>\d+) ?/ ?(?P<total>\d+)\]"
)
# `loss: 2.303494  [   64/60000]`: samples of the epoch
_SAMPLES = re.compile(r"loss\W{1,3}\S+ +\[ *(?P<step>\d+)/ *(?P<total>\d+)\]$", re.I)
# `Epoch 3`, `----- Epoch 3/10 -----`, `Starting epoch 3:`: the next lines do not repeat it
_HEADING = re.compile(
    r"\W*(?:(?:start(?:ing)?(?: of)?|begin(?:ning)?(?: of)?|training|train) )?epoch\W{0,3}\d+"
    r"(?: ?(?:/|of) ?\d+)?\W*",
    re.I,
)
# `[GPU0] Epoch 1 | Batchsize: 32 | Steps: 2048`: PyTorch's DDP tutorial, which prints no others
_EPOCH_SIZE = re.compile(
    r"(?:\[\w{1,20}\]:? )?epoch\W{1,3}\d+\W{1,3}batch ?size\W{1,3}\d+\W{1,3}steps\W{1,3}(\d+)\W*",
    re.I,
)
# `[100] loss: 0.5`, `100: loss 0.5`
_NUMBER_BEFORE = re.compile(r"(?:\[ *(\d{1,9})\]:?|(\d{1,9}):) +(?=[a-z])", re.I)
_AT_START = re.compile(r"\[ *(?P<step>\d+) ?/ ?(?P<total>\d+) ?\](?! ?\[)")


def number_before(text: str) -> int | None:
    """The number at the start of a whole line."""
    found = _NUMBER_BEFORE.match(text)
    return int(found[1] or found[2]) if found else None


def read_heading(text: str, fact: LogRecord) -> None:
    """Marks a line with an epoch that is the heading of that epoch."""
    if found := _EPOCH_SIZE.fullmatch(text):
        fact.step, fact.epoch_steps = None, int(found[1])
    fact.heading = found is not None or _HEADING.fullmatch(text) is not None


def read(text: str, fact: LogRecord) -> None:
    """Adds them to `fact`, which has no step. The brackets of the epoch itself are not a step:
    `Epoch: [2/100]  [10/5005]`."""
    part = None
    if at := _EPOCH_AT.search(text):
        fact.epoch = float(at["epoch"])
        fact.epochs = int(at["epochs"]) if at["epochs"] else None
        part = PART.search(text, at.end())
    if not part and fact.epoch is not None:
        part = _BESIDE_EPOCH.search(text)
    if not part and (batch := (_BATCH.search if fact.epoch is not None else _BATCH.match)(text)):
        fact.step = int(batch["of_batches"] or batch["batch"])
        total = batch["batches"] or batch["of"]
        fact.total, fact.whole_epoch = int(total) if total else None, True
    elif not part and (
        whole := _PAIR.search(text) or _PAIR_OF.match(text) or _SAMPLES.search(text)
    ):
        _take(fact, whole)
        fact.whole_epoch = True
    if part:
        fact.whole_epoch = True
    elif at is None and fact.step is None:
        part = _OF_RUN.search(text)
        if part is None and fact.epoch is None and (alone := _AT_START.match(text)):
            _take(fact, alone)
    if part:
        fact.step, fact.total = int(part["done"]), int(part["of"])


def _take(fact: LogRecord, found: re.Match[str]) -> None:
    for name, value in found.groupdict().items():
        if value is not None:
            setattr(fact, name, float(value) if name == "epoch" else int(value))
