"""What an evaluation of trained weights has found, for a table or a page. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["input", "output", "target"]
SIZES = ("tokens", "bytes")  # amounts of data among the scores


@dataclass
class Picture:
    kind: Kind
    png: bytes
    psnr: float | None = None  # dB, of the whole frame


@dataclass
class Part:
    """A part of the data: a clip, or a passage of text."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    text: str = ""
    pictures: list[Picture] = field(default_factory=list)


@dataclass
class Evaluation:
    """`run`: name; `weights`: their kind (training.tasks.weights); `folder`: of the run or the
    exported model; `file`: the weights; `parts`: clips, or the passages with the highest and the
    lowest loss, in this order."""

    run: str
    step: int
    weights: str
    folder: str
    file: str
    scores: dict[str, float]
    parts: list[Part] = field(default_factory=list)
