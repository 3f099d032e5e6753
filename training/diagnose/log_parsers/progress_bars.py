"""Progress bars in logs: tqdm, rich (Lightning), Keras."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIME = r"(?:\d+ days?, )?[\d:]+"
# `Epoch 3:  45%|████▌     | 450/1000 [00:12<00:15, 36.10it/s, v_num=0, train_loss=0.123]`, without
# a total `450it [00:12, 36.1it/s]`
_TQDM = re.compile(
    r"(?:(?P<head>[^|%]{0,120}?):? *\b\d{1,3}%\|[^|]{0,400}\| "
    r"*)?(?P<done>\d+(?:\.\d+)?[kMG]?)(?:/(?P<of>\d+(?:\.\d+)?[kMG]?)|[a-zA-Z]+) "
    rf"\[(?P<elapsed>{_TIME})(?:<(?P<left>{_TIME}|\?))?, *"
    r"(?P<rate>\?|[\d.]+(?:e[-+]?\d+)?) *[kMG]?(?P<unit>[a-zA-Z]+/s|s/[a-zA-Z]+)(?:, "
    r"(?P<rest>.*?))?\]"
)
# `Epoch 2/9  ━━━━━━━━━━━━━━━ 100/100 0:00:00 • 0:00:12 1233.16it/s train_loss: 0.123 val_loss: 0.2`
_RICH = re.compile(
    r"(?P<head>[^━\r\n]{0,120}?) *[━╸╺]{2,} +(?P<done>\d+)/(?P<of>\d+) (?P<elapsed>[\d:]+) • "
    r"+(?:(?P<left>[\d:]+|-:--:--) +)?"
    r"(?P<rate>[\d.]+)(?P<unit>it/s)(?P<rest>.*)"
)
# `450/938 [====>....] - ETA: 5s - loss: 0.42` and `938/938 ━━━━━━━━ 5s 5ms/step - accuracy: 0.87 -
# loss: 0.42`
_KERAS = re.compile(
    r"^ *(?P<done>\d+)/(?P<of>\d+) (?:\[[=>.]{5,}\]|[━╸╺]{5,}) (?:- )?(?:ETA: "
    r")?(?P<left>[\d:]+m?s?)"
    r"(?: (?P<rate>[\d.]+)(?P<unit>[mu]?s)/step)?(?P<rest> - .*)?"
)
_EPOCH = re.compile(
    r"\b(?:epochs?|ep)\b\W{0,3}(?P<epoch>\d+)(?: *(?:/|of) *(?P<epochs>-?\d+))?", re.I
)
_OF_EPOCHS = re.compile(r"\W*(?:training )?epochs?\W*", re.I)
# Bars of anything but training.
_OTHER = re.compile(
    r"\b(?:val\w*|eval\w*|test\w*|sanity|predict\w*|sampl\w+|generat\w+|download\w*|upload\w*|fetch\w*|load\w*|resolv\w+|map|filter\w*|tokeniz\w*"
    r"|group\w*|sav\w+|writ\w+|cach\w+|extract\w*|scan\w*|pack\w*|process\w*|creat\w+|build\w*|convert\w*|prepar\w*|compil\w*|warm\w*|infer\w*"
    r"|shards?|index\w*|read\w*|comput\w*)\b",
    re.I,
)
# tqdm moves the cursor up again after a nested bar, which it fills with spaces
NESTED = re.compile(r"\] *\x1b\[A|\x1b\[A\s*$")
_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class ProgressBar:
    done: int
    total: int | None
    elapsed_s: float | None
    left_s: float | None
    step_ms: float | None
    epoch: int | None
    epochs: int | None
    of_epochs: bool  # it counts epochs, not steps
    head: str  # text before the bar: `Epoch 3 loss 0.1`
    rest: str  # text in the bar: `loss=0.1`
    behind: str  # text after the bar, which the program printed before the next one
    kind: str  # "tqdm", "rich", "keras"
    other: bool  # it does not count training steps


def find(text: str) -> ProgressBar | None:
    """The last bar of a segment: the one that a terminal shows."""
    if "[" in text and "/" in text and (bars := list(_TQDM.finditer(text))):
        return _bar(bars[-1], "tqdm", bars[-1]["head"] or "")
    if rich := _RICH.search(text) if "━" in text or "╸" in text else None:
        return _bar(rich, "rich", rich["head"])
    if keras := _KERAS.search(text):
        return _bar(keras, "keras", "")
    return None


def _bar(found: re.Match[str], kind: str, head: str) -> ProgressBar:
    part = found.groupdict()
    rate, unit = part["rate"], part["unit"]
    step_ms = None
    if rate and rate != "?" and float(rate) > 0:
        if kind == "keras":
            step_ms = float(rate) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]
        else:
            step_ms = 1e3 * float(rate) if unit.startswith("s/") else 1e3 / float(rate)
    rest, behind = part["rest"] or "", found.string[found.end() :].strip()
    if behind.startswith(","):  # `lr=[1e-05], loss=0.3]`: the match ended within the bar
        rest, behind = rest + behind, ""
    epoch = _EPOCH.search(head)
    epochs = int(epoch["epochs"]) if epoch and epoch["epochs"] else None
    return ProgressBar(
        done=_count(part["done"]),
        total=_count(part["of"]) if part["of"] else None,
        elapsed_s=seconds(part.get("elapsed")),
        left_s=seconds(part["left"]),
        step_ms=step_ms,
        epoch=int(epoch["epoch"]) if epoch else None,
        epochs=epochs if epochs and epochs > 0 else None,
        of_epochs=_OF_EPOCHS.fullmatch(head) is not None,
        head=head,
        rest=rest,
        behind=behind,
        kind=kind,
        other=bool(_OTHER.search(head)),
    )


def _count(text: str) -> int:
    scale = _SCALES.get(text[-1], 1)
    return round(float(text.rstrip("kMG")) * scale)


def seconds(text: str | None) -> float | None:
    """`1 day, 2:03:04`, `12:05`, `5s` in seconds; None for anything else."""
    found = re.fullmatch(r"(?:(\d+) days?, )?(?:(\d+):)?(?:(\d+):)?(\d+)s?", text or "")
    if not found:
        return None
    days, first, second, last = (int(g) if g else 0 for g in found.groups())
    # `12:05` has one colon: its first number is minutes.
    hours, minutes = (first, second) if found[3] else (0, first)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + last)
