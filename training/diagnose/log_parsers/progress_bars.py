"""Progress bars in logs: tqdm, rich (Lightning), YOLO, Keras."""

from __future__ import annotations

import math
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
# `12/300  3.87G  3.63  5.712  4.189  176  640: 100% ━━━━━━━━━━━━ 8/8 3.1it/s 2.6s<0.4s`
_YOLO = re.compile(
    r"(?P<head>[^━╸─%\r\n]{0,160}?):? *\b\d{1,3}% [━╸─]{12} (?P<done>\d+)/(?P<of>\d+) +"
    r"(?:[\d.]+[KMG]it/s +|(?P<rate>[\d.]+)(?P<unit>it/s) +)?"
    r"(?P<elapsed>[\d:.]+s?)(?:<(?P<left>[\d:.]+s?))?(?P<rest>)"
)
# Before a bar of YOLO: epoch, memory, losses, objects and size of the images
_YOLO_HEAD = re.compile(
    r"(?P<epoch>\d+/\d+) +(?P<memory>\d[\d.]*)G +(?P<losses>(?:\S+ +){1,8}?)\d+ +\d+:?"
)
_TORCHTUNE = re.compile(r"(?P<epoch>\d+)\|\d+\|Loss: ")  # `1|100|Loss: 0.81:  12%|█▏ | 100/800`
_EPOCH = re.compile(
    r"\b(?:epochs?|ep)\b\W{0,3}(?P<epoch>\d+)(?: *(?:/|of) *(?P<epochs>-?\d+))?", re.I
)
_OF_EPOCHS = re.compile(r"\W*(?:training )?epochs?\W*", re.I)
# Bars of anything but training.
_OTHER = re.compile(
    r"\b(?:val\w*|eval\w*|test\w*|sanity|predict\w*|sampl\w+|generat\w+|download\w*|upload\w*|fetch\w*|load\w*|resolv\w+|map|filter\w*|tokeniz\w*"
    r"|group\w*|sav\w+|writ\w+|cach\w+|extract\w*|scan\w*|pack\w*|process\w*|creat\w+|build\w*|convert\w*|prepar\w*|compil\w*|warm\w*|infer\w*"
    r"|shards?|index\w*|read\w*|comput\w*|class +images)\b",
    re.I,
)
_OF_DATA = ("examples/s", "s/examples")  # of `datasets`, whatever it does with them
_OF_BYTES = ("B/s", "s/B", "iB/s", "s/iB")  # without their prefix: a download
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
    kind: str  # "tqdm", "rich", "yolo", "keras"
    other: bool  # it does not count training steps


def find(text: str) -> ProgressBar | None:
    """The last bar of a segment: the one that a terminal shows."""
    if "[" in text and "/" in text and (bars := list(_TQDM.finditer(text))):
        head = _named(bars[-1]["head"] or "")
        if tuned := _TORCHTUNE.match(text):
            head = f"epoch {tuned['epoch']} {head}"
        return _bar(bars[-1], "tqdm", head)
    if yolo := _YOLO.search(text) if "━" in text or "─" in text else None:
        return _bar(yolo, "yolo", _named(yolo["head"]))
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
    # Lightning's rich bar names the last epoch, counted from 0
    epochs = int(epoch["epochs"]) + (kind == "rich") if epoch and epoch["epochs"] else None
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
        other=bool(_OTHER.search(head))
        or unit in _OF_BYTES
        or (unit in _OF_DATA and "loss" not in rest),
    )


def _named(head: str) -> str:
    """The columns of YOLO with their names; any other text is unchanged."""
    columns = _YOLO_HEAD.fullmatch(head.strip())
    if not columns:
        return head
    losses = [number for word in columns["losses"].split() if (number := _number(word)) is not None]
    *parts, last = losses or [math.nan]
    # older versions have the total in the last column
    total = last if parts and math.isclose(sum(parts), last, rel_tol=2e-3) else sum(losses)
    return f"epoch {columns['epoch']} memory {columns['memory']}GB loss {total:g}"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _count(text: str) -> int:
    scale = _SCALES.get(text[-1], 1)
    return round(float(text.rstrip("kMG")) * scale)


def seconds(text: str | None) -> float | None:
    """`1 day, 2:03:04`, `12:05`, `5s` in seconds; None for anything else."""
    found = re.fullmatch(r"(?:(\d+) days?, )?(?:(\d+):)?(?:(\d+):)?(\d+)(?:\.\d+)?s?", text or "")
    if not found:
        return None
    days, first, second, last = (int(g) if g else 0 for g in found.groups())
    # `12:05` has one colon: its first number is minutes.
    hours, minutes = (first, second) if found[3] else (0, first)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + last)
