"""Conversion of other tools' values to Duet fields, for training/config/foreign_names.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

RANKS = "N"  # not a field: the number of processes
Changes = dict[str, str]  # field, RANKS or an environment variable in capitals → text of its value
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "null")


@dataclass(frozen=True)
class Sizes:
    """Inputs of a translation: the run without the foreign name."""

    device_batch_size: int
    max_seq_len: int
    ranks: int  # on each machine
    total_batch_size: int
    num_iterations: int
    depth: int
    runs: tuple[str, ...] = ()  # resumable runs, newest first
    nnodes: int = 1

    @property
    def all_ranks(self) -> int:
        return self.ranks * self.nnodes


Translate = Callable[[str, Sizes], Changes | None]  # None: this value has no equivalent


def same(field: str) -> Translate:
    return lambda text, _: {field: text}


def count(field: str) -> Translate:
    """A whole number; other tools use -1 for off and accept 3.0 for 3."""

    def translate(text: str, _: Sizes) -> Changes | None:
        if text == "-1":
            return {field: "0"}
        return {field: text[:-2] if text.endswith(".0") else text}

    return translate


def steps(field: str) -> Translate:
    """As count(); other tools also accept a fraction of an epoch or of the training."""

    def translate(text: str, sizes: Sizes) -> Changes | None:
        number = _number(text)
        fraction = number is not None and 0 <= number <= 1 and not _whole(text)
        return None if fraction else count(field)(text, sizes)

    return translate


def words(table: Mapping[str, Changes | None], otherwise: Translate | None = None) -> Translate:
    """Translation by a table of words; a switch without a value is "true"."""

    def translate(text: str, sizes: Sizes) -> Changes | None:
        word = text.lower()
        word = "true" if word in TRUE else "false" if word in FALSE else word
        return table[word] if word in table else otherwise(text, sizes) if otherwise else None

    return translate


def switch(on: Changes | None, off: Changes | None = None) -> Translate:
    """Translation of a switch; `off`: no change by default."""
    return words({"true": on, "false": off or {}})


def times(field: str, *factors: str) -> Translate:
    def translate(text: str, sizes: Sizes) -> Changes | None:
        if not _whole(text):
            return None
        return {field: str(int(text) * math.prod(getattr(sizes, factor) for factor in factors))}

    return translate


def steps_of_tokens(text: str, sizes: Sizes) -> Changes | None:
    number = _number(text)
    return (
        {"num_iterations": str(max(1, math.ceil(number / sizes.total_batch_size)))}
        if number and number > 0
        else None
    )


def warmup(text: str, sizes: Sizes) -> Changes | None:
    number = _number(text)
    if number is None or number < 0:
        return None
    if number < 1:  # Hugging Face: a fraction of the steps
        return {"warmup_ratio": text}
    return (
        {"warmup_ratio": f"{min(1.0, float(number) / sizes.num_iterations):.4g}"}
        if sizes.num_iterations
        else None
    )


def ranks(text: str, _: Sizes) -> Changes | None:
    """A number of processes, or GPU indices."""
    indices = text.strip("[]").replace(" ", "").split(",")
    if len(indices) > 1 and all(map(_whole, indices)):
        return {RANKS: str(len(indices)), "CUDA_VISIBLE_DEVICES": ",".join(indices)}
    return {RANKS: text} if _whole(text) and int(text) else None


def gpu_list(text: str, sizes: Sizes) -> Changes | None:
    return (
        ranks(text, sizes)
        if "," in text
        else {RANKS: "1", "CUDA_VISIBLE_DEVICES": text}
        if _whole(text)
        else None
    )


def one_rate(text: str, _: Sizes) -> Changes | None:
    return (
        {"optimizer": "adamw", "matrix_lr": text, "embedding_lr": text, "unembedding_lr": text}
        if _number(text) is not None
        else None
    )


def endpoint(text: str, _: Sizes) -> Changes | None:
    host, colon, port = text.rpartition(":")
    return (
        {"master_addr": host, "master_port": port}
        if colon and _whole(port)
        else {"master_addr": text}
        if text
        else None
    )


def existing(field: str) -> Translate:
    """A path if it exists; other tools also accept names on a hub."""
    return lambda text, _: (
        {field: text} if text and os.path.exists(os.path.expanduser(text)) else None  # noqa: PTH111
    )


def resume(text: str, sizes: Sizes) -> Changes | None:
    """The run of a checkpoint path, or the newest run."""
    named = next((run for run in sizes.runs if run in text.split("/")), "")
    if named:
        return {"resume": named}
    return {"resume": "latest"} if sizes.runs else None


def all_blocks(text: str, sizes: Sizes) -> Changes | None:
    return switch(
        {"activation_checkpointing": str(sizes.depth)}, {"activation_checkpointing": "none"}
    )(text, sizes)


def nothing(_text: str, _sizes: Sizes) -> Changes | None:
    """Omitted: Duet always does it or decides it."""
    return {}


def none(_text: str, _sizes: Sizes) -> Changes | None:
    return None


def _whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
